"""Every bound in Holdfast, with its reason. Crossing one is a typed error that names it, and nothing is written."""

from typing import Final

# Keys and values.
KEY_BYTES_MAX: Final = 2_048  # PostgreSQL refuses B-tree entries over 2,704 bytes.
VALUE_BYTES_MAX: Final = 1_048_576  # Larger bodies belong in the object store, where they stream.
INTEGER_BITS_MAX: Final = 64  # Eight bytes a number keep tuple keys short and comparable.
TUPLE_DEPTH_MAX: Final = 16  # Keys are shallow by nature; a bound keeps a hostile one from exhausting the stack.

# Transactions.
TRANSACTION_BYTES_MAX: Final = 16_777_216  # One commit fits a write buffer and a PostgreSQL message, with room.
WRITE_COST_BYTES: Final = 128  # What each write counts for beside its bytes, so that many small ones are bounded too.
SCAN_ITEMS_MAX: Final = 10_000  # One scan's answer is a list in memory; walk longer ranges in pages.
PAGE_ITEMS: Final = 1_000  # What `pages` asks for at a time.
REMEMBERED_BYTES: Final = 16_777_216  # Of what was read or written lately that a RocksDB keeps at hand, up to twice,
REMEMBERED_VALUE_BYTES_MAX: Final = 4_096  # and how long a value may be for that.
TURN_LOOP_SECONDS_MAX: Final = 0.002  # For so long an event loop stands still until another thread has had its turn.
TURN_WAIT_SECONDS_MAX: Final = 10.0  # A transaction that cannot start by then is refused as Busy.
CONFLICT_RETRIES_MAX: Final = 32  # Attempts before a transaction that keeps losing is refused as a Conflict.
CONFLICT_PAUSE_MS_MAX: Final = 100  # Back-off doubles from 1 ms up to this, with full jitter.

# Durability.
IMPORTANT_SYNC_SECONDS_MAX: Final = 5.0  # How long an IMPORTANT write may stay unsynced.
SYNC_WAIT_SECONDS_MAX: Final = 60.0  # A device that takes longer has failed as far as callers are concerned.
INLINE_SYNC_SECONDS_MAX: Final = 0.005  # A loop syncs itself: a thread would wait for the interpreter as long as this.
INLINE_SYNC_PAUSE: Final = 4  # After a slower one, so many groups are synced by a thread before it tries again.
INLINE_SYNC_WAITERS_MAX: Final = 32  # Above this, the next group's work overlaps the sync and a thread hop pays off.

# Groups of callers on PostgreSQL.
GROUP_CALLERS_MAX: Final = 256  # Callers whose work shares one database transaction.
GROUP_QUEUE_MAX: Final = 10_000  # Callers that may wait for a turn before one more is refused as Busy.

# Connections to PostgreSQL.
CONNECT_ATTEMPTS_MAX: Final = 6  # With doubling pauses from 100 ms, about three seconds in all.
CONNECT_PAUSE_MS_MAX: Final = 2_000
READERS_MAX: Final = 4  # Connections that serve read snapshots beside the one that commits.

# Watches.
WATCHES_MAX: Final = 100_000  # Each costs a few hundred bytes; more than this is a leak.
NOTIFY_BYTES_MAX: Final = 7_900  # PostgreSQL refuses notification payloads of 8,000 bytes.

# Blobs.
BLOB_INLINE_BYTES_MAX: Final = 16_384  # Up to here a body lives in the key space and needs no second store.
BLOB_SPOOL_BYTES: Final = 8_388_608  # A stream stays in memory up to here while its hash is computed, then on disk.
BLOB_PART_BYTES: Final = 1_048_576  # Bodies are read, hashed and written on in pieces of at most this.
BLOB_VERIFY_SAMPLE: Final = 0.01  # Of the reads that are hashed again when verification is sampled.

# Worlds.
BATCH_ENTRIES_MAX: Final = 256  # One append, or one drain; more would hold up everybody else's commits.
BATCH_BYTES_MAX: Final = 262_144
READ_ENTRIES_MAX: Final = 10_000  # One read of a journal or an inbox is a list in memory.
INBOX_INLINE_BYTES_MAX: Final = 4_096  # Larger payloads are stored as blobs and travel by their hash.
VALUE_DEPTH_MAX: Final = 100  # Decoders refuse deeper nesting, and encoders may exhaust their stack.
INBOX_ITEM_BYTES_MAX: Final = 65_536  # With everything it asks for, an item must fit a batch with room for others.
INBOX_REQUESTS_MAX: Final = 64  # Effects, and timers, that one item may ask for.
INTENT_HASH_BYTES_MAX: Final = 128  # It is part of a key.
INBOX_TEXT_BYTES_MAX: Final = 1_024  # Schemas, kinds, commands and the like are names, not bodies.
INBOX_HEADERS_MAX: Final = 32
SEGMENT_ENTRIES: Final = 1_024  # How many records one cold segment holds.
SEGMENT_MARGIN: Final = 64  # Records below the baseline that stay hot, for readers that are a little behind.
EXPORT_PAGE: Final = 16  # Records that an export reads at a time, some tens of microseconds of work.
EXPORT_REST_SECONDS: Final = 0.0003  # How long it rests after each, for those who wait for the interpreter.
EXPORT_REST_SECONDS_A_RECORD: Final = 0.00006  # And after a segment, whose syncs those of appends have to wait for.
SEGMENTS_CACHED: Final = 8  # Parsed segments that a plane keeps for the next read.
INBOX_GRACE_SECONDS: Final = 3_600  # How long a drained item stays readable.
TRIM_ENTRIES: Final = 1_024  # Hot records that one transaction of a compaction removes.

# Lists that tell something of each thing in them.
SURVEY_MAX: Final = 100  # Each is several reads, and everybody else waits for a page.
KIND_SAMPLE: Final = 32  # Entities of a kind that are looked at for the names of its fields.

# The console.
CONSOLE_WATCHERS_MAX: Final = 64  # Pages that are open and live,
CONSOLE_WATCHERS_OF_TOKEN_MAX: Final = 16  # and those of one token, so that none shuts the others out.
CONSOLE_LOOK_SECONDS: Final = 0.2  # How often a page hears what has changed.
CONSOLE_SAMPLE_SECONDS: Final = 1.0  # How often the charts of all pages get another point.
CONSOLE_SAMPLES: Final = 300  # Points that a page gets when it opens; they are kept while somebody watches.
CONSOLE_SECONDS_MAX: Final = 3_600.0  # Then a page connects again, perhaps to another server.
CONSOLE_UNIVERSES_MAX: Final = 1_000  # Names to choose from.
CONSOLE_REPORT_BYTES_MAX: Final = 33_554_432
CONSOLE_REPORTS_MAX: Final = 64  # Files of the pipeline that are listed.
CONSOLE_PASSES_MAX: Final = 256  # Addresses of reports that are known at a time,
CONSOLE_PASS_SECONDS: Final = 300.0  # and for how long.

# Calls over the network.
ONCE_PERIOD_SECONDS: Final = 600  # A key of a call is remembered for one to two of these.
ONCE_KEY_BYTES_MAX: Final = 256
ONCE_FORGET_BATCH: Final = 1_000  # Keys that one transaction forgets where several servers share the key space.
ONCE_RECENT_MAX: Final = 65_536  # Keys of calls to session logs, which are remembered in memory: some 10 MiB.
FRAME_BYTES_MAX: Final = 4_194_304  # One message of a stream.
HELLO_SECONDS: Final = 10.0  # How long whoever opens a stream may take to say hello.
CALLS_MAX: Final = 4_096  # Calls of one connection that are under way.
READS_MAX: Final = 32  # Groups and single calls of one connection that read at a time: their answers may be long.
UNSENT_BYTES_MAX: Final = 1_048_576  # Replies that a connection may leave unread before nothing more is heard from it.
TOGETHER_REPLIES_MAX: Final = 64  # Deliveries to consumers of one connection that share a frame.
ANSWER_BYTES_MAX: Final = 33_554_432  # One reply. While so much is unread, no further long answer is kept.
UNREAD_SECONDS_MAX: Final = 60.0  # A connection that takes nothing of what waits for it for so long is cut.
GROUP_ANSWERS_BYTES: Final = 1_048_576  # Answers to reads after which a group ends, and the rest is the next one's.

# The object store.
OBJECT_PATH_BYTES_MAX: Final = 1_024  # S3's limit.
OBJECT_PART_BYTES: Final = 8_388_608  # S3 wants parts of at least 5 MiB; memory in flight is a few of these.
OBJECT_LIST_MAX: Final = 1_000  # One page of a listing.
OBJECT_PARTS_IN_FLIGHT: Final = 4  # Bounds the memory of one upload, together with the part size.
OBJECT_LOCAL_READ_BYTES: Final = 1_048_576  # A request to a local disk is cheap; a small one keeps memory small.
OBJECT_STAGED_SECONDS_MAX: Final = 86_400  # A staged file that nobody wrote to for a day is what a crash left behind.

# Leases and state documents.
CORRELATION_ID_CHARACTERS_MAX: Final = 128  # It travels in a header.
NAMES_KNOWN_MAX: Final = 65_536  # Good names that are remembered, so that they are not checked again.
KEY_NAME_CHARACTERS_MAX: Final = 256  # Of a lease or a state; with its universe it fits a key with room.
LEASE_TTL_SECONDS: Final = 30.0
LEASE_TTL_SECONDS_MAX: Final = 86_400.0  # Whoever needs longer keeps it alive; a lost holder must not block for days.
LEASE_WAIT_SECONDS_MAX: Final = 3_600.0
OWNER_BYTES_MAX: Final = 256
STATE_BYTES_MAX: Final = 262_144  # A document; bodies belong in blobs.

# Locks in the process.
LOCK_WAITERS_MAX: Final = 10_000  # Threads and tasks that may wait in one lock table.
LOCK_WAIT_SECONDS: Final = 5.0  # How long to wait for a row unless a caller says otherwise.
LOCK_BULK_WAIT_SECONDS: Final = 10.0  # And for a table or everything, which many may hold.
LOCK_NAME_CHARACTERS_MAX: Final = 512

# Backups of a plane that goes on.
CHECKPOINTS_MAX: Final = 4  # Each holds on to disk that the key space would have given back.
CHECKPOINT_IDLE_SECONDS: Final = 3_600  # Then nobody will come back for it.
LINES_MAX: Final = 1_000  # Of a list that is streamed, at a time,
LINES_SECONDS_MAX: Final = 0.5  # and how long they may be gathered: whoever waits sees that there is life.

# Migrations.
MIGRATION_PAGE_PAIRS: Final = 256  # Pairs that one read takes; a value may have 1 MiB.
MIGRATION_BATCH_PAIRS: Final = 1_000  # Pairs of one transaction,
MIGRATION_BATCH_BYTES: Final = 2_097_152  # and their bytes.
MIGRATION_RANGE_PAIRS: Final = 4_096  # Pairs that are compared by one digest, and copied again if it differs.

# Session logs.
ACTIVITY_FLUSH_SECONDS: Final = 0.2  # How long a record may stay in memory.
ACTIVITY_BUFFER_BYTES_MAX: Final = 1_048_576  # Above this the caller writes the session's records itself.
ACTIVITY_FILE_BYTES_MAX: Final = 67_108_864  # A larger file is closed and rotated into the object store.
ACTIVITY_RECORD_BYTES_MAX: Final = 65_536
ACTIVITY_SESSIONS_MAX: Final = 10_000  # Open session logs of one plane; each holds a file open while it is written.
ACTIVITY_IDLE_SECONDS: Final = 600  # Then a session's file is closed; sooner would cut quiet sessions into crumbs.
ACTIVITY_NAMES_CHARACTERS_MAX: Final = 160  # Session and kind share a file's name of 255 bytes with a time and a hash.
ACTIVITY_COPIES_MAX: Final = 10_000  # Files of one session and kind that begin in one second.
ACTIVITY_RETRY_SECONDS: Final = 60.0  # How soon a file that the object store refused is offered to it again.

# Entities.
ENTITY_BYTES_MAX: Final = 262_144  # All fields of one entity together.
ENTITY_FIELDS_MAX: Final = 256
ENTITY_WRITES_MAX: Final = 256  # Entities that one tiered transaction may change.
ENTITY_HISTORY_VERSIONS: Final = 1_000  # Changes of an entity that stay readable; older ones make room.
ENTITY_ATTEMPTS: Final = 10  # How often a change is tried when the version moves under it.
TIER_CACHE_ENTRIES: Final = 16_384  # Different fields of which a policy remembers the tier.

# Queues.
PAYLOAD_INLINE_BYTES_MAX: Final = 16_384  # Larger payloads are stored as blobs.
PAYLOAD_CARRIED_BYTES_MAX: Final = 1_024  # Up to here a payload is written again with every delivery; above, once.
PAYLOAD_FETCH_BYTES_MAX: Final = 1_048_576  # Blobs up to here come along with a delivery; larger ones are streamed.
MESSAGES_MAX: Final = 256  # In one batch of any operation.
QUEUE_NAME_CHARACTERS_MAX: Final = 124  # So that the queue of its dead letters has a name too.
ATTRIBUTES_MAX: Final = 64
ATTRIBUTES_BYTES_MAX: Final = 8_192
PRIORITY_MAX: Final = 9
MAX_ATTEMPTS_MAX: Final = 1_000
VISIBILITY_SECONDS_MAX: Final = 43_200.0
DELAY_SECONDS_MAX: Final = 31_536_000.0
TTL_SECONDS_MAX: Final = 31_536_000.0 * 10
RECEIVE_WAIT_SECONDS_MAX: Final = 3_600.0
IDEMPOTENCY_SECONDS: Final = 300  # How long an idempotency key is remembered.
IDEMPOTENCY_KEY_BYTES_MAX: Final = 256
ACK_MEMORY_SECONDS: Final = 300  # How long a repeated ack is recognised.
LAST_ERROR_BYTES_MAX: Final = 4_096  # Longer ones are cut.
EXTEND_FOR_SECONDS: Final = 3_600.0  # How long a lease is extended by itself while a message is worked on.
EVENTS_EVERY_SECONDS: Final = 0.1  # How often what happened to messages is told to the session log.
EVENTS_MAX: Final = 65_536  # Events that may wait for that in memory.
DUE_BATCH: Final = 64  # Messages whose time has come that one transaction attends to.
ATOMIC_OPERATIONS_MAX: Final = 256  # In one atomic list.
SCHEDULES_MAX: Final = 1_000  # Of one queue.

# Mail.
MAIL_BYTES_MAX: Final = 65_536  # Of an envelope's body.
MAIL_TTL_SECONDS: Final = 7 * 86_400.0
MAIL_TTL_SECONDS_MAX: Final = 10 * 365 * 86_400.0
MAIL_ID_CHARACTERS_MAX: Final = 64
MAIL_BATCH_MAX: Final = 256  # Mails in one send, read or confirmation.
MAIL_WAIT_SECONDS_MAX: Final = 20.0
MAILBOX_MAX: Final = 1_000  # Mails that wait in one mailbox, unless its universe's policy says otherwise.
MAILBOX_MAX_MAX: Final = 1_000_000
MAIL_SWEEP_SECONDS: Final = 300.0
MAIL_SWEEP_BATCH: Final = 256  # Mails, and receipts, that one transaction of a sweep removes.
MAIL_SWEEP_ROOMS: Final = 16  # Rooms that it looks at.
MAIL_SWEEPS_MAX: Final = 1_000  # Transactions of one sweep of a universe; what is left waits for the next one.
RECEIPTS_MAX: Final = 10_000  # Receipts that are kept for a sender; the oldest are forgotten first.
BLOCKS_MAX: Final = 1_000  # Senders that one mailbox blocks.
AGENT_KEY_BYTES: Final = 32
CONTENT_TYPE_CHARACTERS_MAX: Final = 256

# Ingress.
INGRESS_QUEUE_MAX: Final = 4_096  # Accepted pushes that wait for the writer.
INGRESS_QUEUE_BYTES_MAX: Final = 67_108_864  # And all their bodies, since few large ones take as much as many small.
INGRESS_WAIT_SECONDS: Final = 0.02  # How long a push waits for room before it is refused as Busy.
INGRESS_BATCH_MAX: Final = 256  # Pushes of one commit.
INGRESS_BATCH_BYTES_MAX: Final = 2_097_152  # And all their bodies: half of what one group of works may write.
INGRESS_FLUSH_SECONDS: Final = 0.2  # How long the first push of a batch waits for others.
INGRESS_STORE_SECONDS: Final = 2.0  # A batch that is not committed by then is given up.
INGRESS_LAG_SECONDS: Final = 1.0  # A writer that is further behind says so.
INGRESS_SAY_SECONDS: Final = 1.0  # How often the same is logged while it lasts.
INGRESS_FULL_SECONDS: Final = 1.0  # How long a mailbox that was full is taken to be full still.
DEDUPE_SECONDS: Final = 7 * 86_400.0  # How long the key of a push is remembered.
DEDUPE_MAX: Final = 10_000  # Keys that are remembered; the oldest are forgotten first.
DEDUPE_PRUNE_SECONDS: Final = 1.0  # How often keys whose time is over are looked for.
DEDUPE_SNAPSHOT_SECONDS: Final = 5.0  # How often keys are written down, if there are new ones.
PUSHES_PER_MINUTE: Final = 120  # Of one peer, unless the settings say otherwise.
PUSHES_PER_MINUTE_MAX: Final = 100_000_000
PUSH_PEERS_MAX: Final = 10_000  # Peers whose pushes are counted; whoever was quiet longest makes room.
PUSH_PAYLOAD_BYTES_MAX: Final = 131_072  # Before base64, which makes 174,763 characters of it.
PUSH_TEXT_CHARACTERS_MAX: Final = 256  # Of a topic, a key, a session or what is replied to.
RPC_BYTES_MAX: Final = 262_144  # One JSON-RPC request, or one batch of them.
RPC_BATCH_MAX: Final = 64  # Calls of one JSON-RPC batch.

# The relay.
RELAY_AUTHENTICATE_SECONDS: Final = 10.0  # How long an agent may take to answer the challenge.
RELAY_PING_SECONDS: Final = 25.0  # Whoever was silent for so long is asked whether it is there.
RELAY_PONG_SECONDS: Final = 7.0  # And is given up if it does not answer by then.
RELAY_FLUSH_MAILS: Final = 50  # Mails that one read takes out of a mailbox.
RELAY_FLUSH_BYTES: Final = 131_072  # And how many bytes of them, if more than one.
RELAY_IN_FLIGHT_MAX: Final = 256  # Mails that a connection has been sent and has not confirmed.
RELAY_UNSENT_BYTES_MAX: Final = 131_072  # Frames that a slow reader leaves unread before its mailbox rests.
RELAY_RECEIPTS: Final = 256  # Receipts that one read takes.
RELAY_RECEIPTS_SECONDS: Final = 0.1  # How long those that others have written may wait for more.
RELAY_FRAMES_MAX: Final = 1_024  # In one message of an agent.
RELAY_SENDS_MAX: Final = 256  # Mails of one connection that are not stored yet; then it is not read any further.
RELAY_SENDS_BYTES_MAX: Final = 1_048_576
RELAY_CONFIRMS_MAX: Final = 4_096  # Mails of one connection that it has confirmed and that are not removed yet.
RELAY_ROUND_MAILS: Final = 256  # Sent, confirmed or read in one commit; more would hold up everybody else's.
RELAY_ROUNDS_MAX: Final = 4  # Commits that are being synced while the next one is made.
RELAY_RETRY_SECONDS: Final = 1.0  # How soon a key space that failed is asked again.
RELAY_LOOK_SECONDS: Final = 300.0  # How often a mailbox is looked at although nothing told to.
RELAY_RATE_PER_SECOND: Final = 100.0  # Mails of one sender, at an address that others reach.
RELAY_BURST: Final = 200  # As many may come at once.
RELAY_SENDERS_MAX: Final = 65_536  # Senders whose rate is remembered; the quietest are forgotten first.

# The pipeline.
VIEW_TURN_SECONDS_MAX: Final = 60.0  # How long views of one directory, or of one server, may wait for each other,
VIEW_PATIENCE_SECONDS: Final = 1.0  # and for a command that has it open at the moment.
VIEW_OBJECTS_AT_ONCE: Final = 16  # Manifests, or segments that a server sends, that are read at a time.
MANIFESTS_KNOWN_MAX: Final = 65_536  # Of session logs, that a process remembers: they never change.
PIECE_ENTRIES: Final = 8_192  # Hot records that are staged together for an executor to read,
PIECE_BYTES: Final = 8_388_608  # and their bytes.
PIECE_PAGE: Final = 256  # Hot records that one read of the key space takes; each may have 256 KiB.
ROWS_BATCH: Final = 8_192  # Rows of one Arrow batch,
ROWS_BATCH_BYTES: Final = 8_388_608  # and the bytes of their records.
SOURCE_PARTITION_ROWS: Final = 65_536  # Rows of a journal that one task reads: a task costs as much as 10,000 rows.
SOURCE_FILE_BYTES: Final = 8_388_608  # Bytes of session logs that one task reads.
SOURCE_STAGED_SECONDS: Final = 86_400  # How long what was staged for a read stays, if nobody stages it again.
LOAD_BATCH_ROWS: Final = 128  # Rows of a bulk load in one commit: with its key each is two operations.
LOAD_BATCH_BYTES: Final = 1_048_576  # And their bytes: a quarter of a frame.
LOAD_LOOKS: Final = 16  # Threads that ask which rows were written before; a server hears them as one.

# The lake.
LAKE_ROW_GROUP_ROWS: Final = 65_536  # What a reader skips or reads as a whole.
LAKE_ROW_GROUP_BYTES: Final = 33_554_432  # Records may be large; this bounds what a writer holds of one file.
LAKE_FILE_BYTES: Final = 33_554_432  # Compaction makes files of about this size; one of them is sorted in memory.
LAKE_SMALL_FILE_BYTES: Final = 16_777_216  # Files below this are worth compacting.
LAKE_FILES_MIN: Final = 4  # So many small files at least: fewer would be written again and again.
LAKE_WRITERS_MAX: Final = 32  # Files that one task has open, one for each universe.
LAKE_KEEP_HOURS: Final = 168  # How long files stay that no table needs: a reader, or a slow run, may be at them.
LAKE_ATTEMPTS: Final = 32  # How often a run that loses to another one begins again before it is refused as a Conflict.
LAKE_PAUSE_MS_MAX: Final = 1_000  # Back-off doubles from 10 ms up to this, with full jitter.

# Audits, roll-ups and reports.
AUDIT_TASK_BYTES: Final = 67_108_864  # What one executor judges at a time; a world is never cut.
AUDIT_WORLDS_MAX: Final = 4_096  # Worlds of one wave: each is some kilobytes in the driver.
FINDINGS_OF_A_WORLD: Final = 100  # The first ones say what happened; more would only repeat it.
STATE_BYTES_TOLD: Final = 1_048_576  # A larger state is told by its digest alone.
SCAN_TASK_BYTES: Final = 268_435_456  # Of segments, logs and blobs that one executor searches for hashes at a time.
BLOB_GRACE_SECONDS: Final = 86_400.0  # A younger blob may be about to be referred to by whoever stored it.
SIGNATURE_CHARACTERS_MAX: Final = 200  # Of an error's signature: what is said later is rarely what differs.
REPORT_DAYS: Final = 14  # Of which a report plots the hours.
REPORT_ROWS: Final = 15  # Of each of its tables: the lake has all of them.
REPORT_QUEUES_PLOTTED: Final = 4  # Each in a plot of its own.
REPORT_GRID: Final = 12  # Agents on each side of the grid of who talks to whom.
DEAD_LETTERS_MEASURED: Final = 100_000  # Of which a roll-up asks the plane for the error, if logs do not tell it,
ERROR_CHARACTERS_MEASURED: Final = 500  # and how much of it: they are in memory all at once.
ROLLUP_BUCKET_EVENTS: Final = 131_072  # That one executor has in memory at a time, with all that are told of a message.
INGEST_TASK_BYTES: Final = 33_554_432  # What one executor takes at a time; a commit has one of these for each core.
INGEST_CHUNK_BYTES: Final = 4_194_304  # Of one world, so that a large one does not keep a single core busy.
INGEST_WORLDS_MAX: Final = 4_096  # Worlds, and log files, of one commit: each is a line in the log of its table.
INGEST_WORLD_ROWS: Final = 131_072  # Of one world in one commit; what is hot of them is staged.
INGEST_CHANGES: Final = 65_536  # Changes of entities in one commit. The driver itself writes them.
INGEST_CARRIED_BYTES: Final = 65_536  # Hot records of one world travel with their task up to here,
INGEST_CARRIED_BYTES_MAX: Final = 8_388_608  # and those of one commit up to here; others are put into the store.
INGEST_ALONE_BYTES: Final = 1_048_576  # A run that follows takes fewer than these by itself: executors begin too late.
INGEST_FOLLOW_SECONDS: Final = 5.0  # How long a run that follows a plane rests between two looks.
INGEST_HEAL_SECONDS: Final = 300.0  # How soon it looks again whether what was damaged can be read.
INGEST_TIDY_FILES: Final = 64  # And whether so many small files have come together that they are worth compacting.
FINDINGS_MAX: Final = 1_000  # Of what is wrong, so many are told; the quarantine has them all.
