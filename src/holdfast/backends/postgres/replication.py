"""Which log positions would survive the loss of the primary."""

from typing import Final

# Whether everything up to a log position is durable: on the disk of this server, and if it has synchronous standbys, on
# the disks of as many as a commit waits for. A role without pg_read_all_stats does not see the positions of standbys;
# then this is false, and a synced commit finds out.
IS_DURABLE: Final = rb"""
    SELECT CASE WHEN current_setting('synchronous_standby_names') = ''
        THEN pg_current_wal_flush_lsn() >= '%b'::pg_lsn
        ELSE (SELECT count(*) FILTER (WHERE flush_lsn >= '%b'::pg_lsn)
                >= coalesce(substring(current_setting('synchronous_standby_names') FROM '(\d+)\s*\(')::int, 1)
            FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))
        END
"""
