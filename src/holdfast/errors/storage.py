"""What the key space, the object store and what lies below them answer with."""

from holdfast.errors.families import Backend, Conflict, Corrupt, NotFound, Retry


class TransactionConflict(Conflict):
    """The transaction lost to others as often as it may; nothing was written."""

    code = "transaction_conflict"
    retry = Retry.LATER


class ObjectNotFound(NotFound):
    """The object store has no object of that name."""

    code = "object_not_found"


class ObjectExists(Conflict):
    """A create-only put found an object of that name; it was left as it is."""

    code = "object_exists"


class ObjectChanged(Conflict):
    """An if-match put found another version of the object; it was left as it is."""

    code = "object_changed"


class TargetNotEmpty(Conflict):
    """What is to be migrated to holds other data, which is left as it is; choose an empty target."""

    code = "target_not_empty"


class DamagedDatabase(Corrupt):
    """A checksum inside the database does not match, or its log is damaged before its end."""

    code = "damaged_database"


class MissingObject(Corrupt):
    """A body that was recorded as stored is not in the object store."""

    code = "missing_object"


class DirectoryInUse(Backend):
    """Another process has the data directory open."""

    code = "directory_in_use"


class PlaneInUse(Backend):
    """Other processes use the plane, which has to stand still for this; stop them first."""

    code = "plane_in_use"


class MigrationUnfinished(Backend):
    """The plane is the target of a migration that is not complete; run the migration again, it goes on where it was."""

    code = "migration_unfinished"


class PathUnusable(Backend):
    """The data directory cannot be created, read or written."""

    code = "path_unusable"
    retry = Retry.NEVER


class Unreachable(Backend):
    """The server behind a backend does not answer; nothing was written."""

    code = "unreachable"


class DiskFull(Backend):
    """The device has no space left. Free some and open the database again; what was acknowledged is there."""

    code = "disk_full"


class DatabaseFailed(Backend):
    """An earlier failure stopped this database. Open it again; what was acknowledged is there."""

    code = "database_failed"


class SchemaMismatch(Backend):
    """The stored data was laid out by a version that this one does not know."""

    code = "schema_mismatch"
    retry = Retry.NEVER


class Unsupported(Backend):
    """This backend does not offer the operation."""

    code = "unsupported"
    retry = Retry.NEVER


class CommitUnknown(Backend):
    """The answer to a commit was lost: the write may or may not be there. Look, or repeat it idempotently."""

    code = "commit_unknown"
    retry = Retry.IDEMPOTENT
