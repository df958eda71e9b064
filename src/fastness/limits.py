"""Every bound in Fastness, with its reason. Exceeding one raises a typed error that names it; nothing is written."""

from typing import Final

# Keys and values.
KEY_BYTES_MAX: Final = 2_048  # PostgreSQL refuses B-tree entries over 2,704 bytes.
VALUE_BYTES_MAX: Final = 1_048_576  # Larger bodies belong in the object store, where they stream.
INTEGER_BITS_MAX: Final = 64  # Eight bytes a number keep tuple keys short and comparable.
TUPLE_DEPTH_MAX: Final = 16  # Keys are shallow by nature; a bound keeps a hostile one from exhausting the stack.

# Transactions.
TRANSACTION_BYTES_MAX: Final = 16_777_216  # One commit fits easily in a write buffer and in a PostgreSQL message.
WRITE_COST_BYTES: Final = 128  # Added to the size of each write, so that many small writes are bounded too.
SCAN_ITEMS_MAX: Final = 10_000  # One scan returns a list in memory; read longer ranges in pages.
PAGE_ITEMS: Final = 1_000  # Pairs that `pages` reads at a time.
PAIR_CACHE_BYTES: Final = 16_777_216  # Recently used pairs that RocksDatabase caches; up to twice this in memory.
PAIR_CACHE_VALUE_BYTES_MAX: Final = 4_096  # Longer values are not cached.
CLOCK_SLEW_PPM_MAX: Final = 1_000  # A lease of 30 s is off by 30 ms at most while a set clock is approached.
CLOCK_CHECK_SECONDS: Final = 1  # How often the time of the process is compared with the wall clock.
CLOCK_STEP_SECONDS_LOGGED: Final = 1  # A clock that was set by more is logged.
TRANSACTION_LOOP_WAIT_SECONDS_MAX: Final = 0.002  # How long an event loop may block for another thread's transaction.
TRANSACTION_WAIT_SECONDS_MAX: Final = 10.0  # A transaction that cannot start by then fails with Busy.
CONFLICT_RETRIES_MAX: Final = 32  # Attempts before a transaction that keeps conflicting fails with a Conflict.
CONFLICT_PAUSE_MS_MAX: Final = 100  # Back-off doubles from 1 ms up to this, with full jitter.

# Times.
TIME_MS_MAX: Final = 253_402_300_799_999  # The end of the year 9999.

# Durability.
IMPORTANT_SYNC_SECONDS_MAX: Final = 5.0  # How long an IMPORTANT write may stay unsynced.
WATERMARK_WRITE_SECONDS: Final = 0.005  # How far the record of what was synced may lag behind after a killed process,
WATERMARK_SYNC_SECONDS: Final = 2.0  # and after a power loss.
SYNC_WAIT_SECONDS_MAX: Final = 60.0  # A device that takes longer counts as failed.
INLINE_SYNC_SECONDS_MAX: Final = 0.005  # A loop syncs inline up to this: a thread would wait for the GIL about as long.
INLINE_SYNC_PAUSE_BATCHES: Final = 4  # After a slower sync, a thread syncs this many batches before the loop retries.
INLINE_SYNC_WAITERS_MAX: Final = 32  # Above this a thread syncs, so the next batch's work overlaps with the sync.

# Groups of callers on PostgreSQL.
COMMIT_GROUP_MAX: Final = 256  # Callers that share one database transaction.
COMMIT_QUEUE_MAX: Final = 10_000  # Waiting callers; one more fails with Busy.

# Connections to PostgreSQL.
CONNECT_ATTEMPTS_MAX: Final = 6  # With doubling pauses from 100 ms, about three seconds in total.
CONNECT_PAUSE_MS_MAX: Final = 2_000
FAILOVER_SECONDS_MAX: Final = 30.0  # How long transactions wait for a primary once none answers; then Unreachable.
FAILOVER_PAUSE_MS_MAX: Final = 500  # Between the attempts to connect meanwhile.
REPEAT_PAUSE_SECONDS: Final = 0.2  # Before a call whose commit is unknown is executed again.
STANDBY_READERS_MAX: Final = 4  # Connections to a standby; further reads go to the primary.
STANDBY_CONNECT_SECONDS: Final = 2
STANDBY_PAUSE_SECONDS: Final = 5.0  # After no standby has answered, reads go to the primary for so long.
STANDBY_SESSION_SECONDS: Final = 60.0  # Then a connection is replaced: another server may have become the standby.
READERS_MAX: Final = 4  # Connections for read snapshots, besides the one that commits.
IDLE_TRANSACTION_SECONDS_MAX: Final = 3.0  # PostgreSQL then ends a transaction: a paused process holds locks.
IDLE_TRANSACTIONS_MAX: Final = 3  # Attempts of a transaction that PostgreSQL ended because of that.
LOCK_WAIT_SECONDS_MAX: Final = 5.0  # For a lock that another process holds; more than a paused process can hold it.
LOCKED_PARTS_MAX: Final = 256  # Parts that one transaction locks; with more, it locks the whole key space.
SCANNED_PAIRS_MAX: Final = 8_192  # Pairs of earlier scans that a transaction remembers.
LOCK_ATTEMPTS_MAX: Final = 8  # Then a transaction that kept finding other locks taken locks the whole key space.
LOCK_LATE_MS_MAX: Final = 100  # A lock that is granted later than this after the transaction's time needs a new time.
LOCK_LANES_MAX: Final = 4  # Connections that wait for locks which other processes hold.
STATEMENT_SECONDS_MAX: Final = 30.0
ANSWER_SECONDS_MAX: Final = 40.0  # Without an answer by then, the statement is cancelled: a commit may wait for ever.
UNREPLICATED_SECONDS_MAX: Final = 5.0  # The same for a commit after one that its synchronous standby did not confirm.
CANCEL_SECONDS_MAX: Final = 5.0  # Without an answer to that, the connection counts as broken.
OVERLOAD_SECONDS_MAX: Final = 10.0  # How long a transaction is retried while PostgreSQL lacks memory, locks or time.
OVERLOAD_PAUSE_SECONDS_MAX: Final = 0.2  # Between these retries, with full jitter.

# Watches.
WATCHES_MAX: Final = 100_000  # Each costs a few hundred bytes; more than this is a leak.
WATCH_RECHECK_SECONDS: Final = 5.0  # Watches fire this often on PostgreSQL, in case that a notification was lost.
NOTIFY_BYTES_MAX: Final = 7_900  # PostgreSQL refuses notification payloads of 8,000 bytes.

# Blobs.
BLOB_INLINE_BYTES_MAX: Final = 16_384  # Up to this size a body is stored in the key space and needs no object store.
BLOB_NAMED_MAX: Final = 64  # Hashes in a blob's content that its record keeps; with more, the content is searched.
BLOB_TOUCH_SECONDS: Final = 60  # A put of the same content within this time is not recorded again.
BLOB_UPLOAD_SECONDS_MAX: Final = 86_400  # A slower upload is refused: its body may have been deleted as abandoned.
BLOB_ABANDONED_SECONDS: Final = 604_800  # A body without a record is then deleted; far above the slowest upload.
GC_GRACE_SECONDS: Final = 86_400.0  # How long an unreferenced blob is kept, and its body after its record.
SEARCH_PAUSE_SECONDS: Final = 0.001  # A background search for references rests this long after each page.
GC_GRACE_SECONDS_MAX: Final = 31_536_000  # A year.
GC_BATCH: Final = 200  # Blobs that one transaction of a collection marks or deletes.
GC_EVERY_SECONDS: Final = 3_600.0  # How often blobs are deleted, where any are due.
BLOB_SPOOL_BYTES: Final = 8_388_608  # A stream is hashed in memory up to this size, then spooled to disk.
BLOB_PART_BYTES: Final = 1_048_576  # Bodies are read, hashed and written in parts of at most this size.
BLOB_VERIFY_SAMPLE: Final = 0.01  # The fraction of reads that are hashed again when verification is sampled.

# Worlds.
BATCH_ENTRIES_MAX: Final = 256  # Entries of one append, or one drain; more would delay other commits.
BATCH_BYTES_MAX: Final = 262_144
READ_ENTRIES_MAX: Final = 10_000  # One read of a journal or an inbox returns a list in memory.
RESTORE_CHECK_PAGE: Final = 1_000  # Records that the check before a restore reads at a time.
INBOX_INLINE_BYTES_MAX: Final = 4_096  # Larger payloads are stored as blobs and referenced by hash.
VALUE_DEPTH_MAX: Final = 100  # Decoders reject deeper nesting, and encoders may exhaust their stack.
INBOX_ITEM_BYTES_MAX: Final = 65_536  # With everything it requests, an item must fit in a batch together with others.
INBOX_REQUESTS_MAX: Final = 64  # Effects, and timers, that one item may request.
INTENT_HASH_BYTES_MAX: Final = 128  # It is part of a key.
INBOX_TEXT_BYTES_MAX: Final = 1_024  # Schemas, kinds, commands and so on are names, not bodies.
INBOX_HEADERS_MAX: Final = 32
SEGMENT_ENTRIES: Final = 1_024  # Records in one cold segment.
SEGMENT_MARGIN: Final = 64  # Records below the baseline that stay hot, for readers that lag slightly.
EXPORT_PAGE: Final = 16  # Records that an export reads at a time: tens of microseconds of work.
EXPORT_PAUSE_SECONDS: Final = 0.0003  # Pause after each page, so that other threads get the GIL.
EXPORT_PAUSE_SECONDS_PER_RECORD: Final = 0.00006  # Pause after a segment, whose syncs delay those of appends.
SEGMENTS_CACHED: Final = 8  # Parsed segments that a plane caches.
INBOX_GRACE_SECONDS: Final = 3_600  # How long a drained item stays readable.
TRIM_ENTRIES: Final = 1_024  # Hot records that one compaction transaction removes.

# Lists with a summary of each item.
SUMMARY_LIST_MAX: Final = 100  # Each item takes several reads, and other callers wait for a page.
KIND_SAMPLE: Final = 32  # Entities of a kind that are read to find its field names.

# The console.
CONSOLE_WATCHERS_MAX: Final = 64  # Open live pages,
CONSOLE_WATCHERS_PER_TOKEN_MAX: Final = 16  # and those of one token, so that one token cannot use all of them.
CONSOLE_POLL_SECONDS: Final = 0.2  # How often a page receives changes.
CONSOLE_SAMPLE_SECONDS: Final = 1.0  # How often the charts get another point.
CONSOLE_SAMPLES: Final = 300  # Points that a page receives when it opens; kept while at least one page is open.
CONSOLE_SECONDS_MAX: Final = 3_600.0  # A page then reconnects, possibly to another server.
CONSOLE_UNIVERSES_MAX: Final = 1_000  # Universes listed for selection.
CONSOLE_LIVE_MINUTES: Final = 60  # Minutes of the live aggregates that a page shows,
CONSOLE_LIVE_QUEUES_MAX: Final = 50  # the queues with the most events of them,
CONSOLE_LIVE_ROWS_MAX: Final = 1_000_000  # and the rows that are read for it.
CONSOLE_REPORT_BYTES_MAX: Final = 33_554_432
CONSOLE_REPORTS_MAX: Final = 64  # Pipeline files listed.
CONSOLE_REPORT_LINKS_MAX: Final = 256  # Report links that are valid at a time,
CONSOLE_REPORT_LINK_SECONDS: Final = 300.0  # and for how long.
CONSOLE_JOBS_MAX: Final = 64  # Jobs of the pipeline whose last runs are listed,
CONSOLE_JOB_RECORD_BYTES_MAX: Final = 65_536  # and the size of a record; one has row counts and a short error.

# Calls over the network.
CALL_KEY_PERIOD_SECONDS: Final = 600  # A call's idempotency key is remembered for one to two of these periods.
CALL_KEY_BYTES_MAX: Final = 256
CALL_KEY_EXPIRY_BATCH: Final = 1_000  # Expired keys that one transaction removes from a shared key space.
RECENT_CALL_KEYS_MAX: Final = 65_536  # Keys of session log calls, remembered in memory: about 10 MiB.
FRAME_BYTES_MAX: Final = 4_194_304  # One message of a stream.
WEBSOCKET_FRAMES_MAX: Final = 4_096  # Fragments and pings before a whole message: the longest has fragments of 1 KiB.
HELLO_SECONDS: Final = 10.0  # How long a client may take to send hello on a new stream.
CALLS_MAX: Final = 4_096  # Concurrent calls of one connection.
READS_MAX: Final = 32  # Batches and single calls of one connection that read concurrently: their replies may be large.
UNSENT_BYTES_MAX: Final = 1_048_576  # Unread replies of a connection before the server stops reading its requests.
REPLY_BATCH_MAX: Final = 64  # Deliveries to consumers of one connection that share a frame.
ANSWER_BYTES_MAX: Final = 33_554_432  # One reply. While this much is unread, no further large reply is buffered.
SLOW_PEER_SECONDS_MAX: Final = 60.0  # A connection that reads nothing of its pending data for this long is closed.
READ_BATCH_REPLY_BYTES: Final = 1_048_576  # A batch of reads ends after this many bytes of replies.

# The object store.
OBJECT_PATH_BYTES_MAX: Final = 1_024  # S3's limit.
OBJECT_PART_BYTES: Final = 8_388_608  # S3 wants parts of at least 5 MiB; memory in flight is a few of these.
OBJECT_LIST_MAX: Final = 1_000  # One page of a listing.
OBJECT_PARTS_IN_FLIGHT: Final = 4  # Bounds the memory of one upload, together with the part size.
OBJECT_LOCAL_READ_BYTES: Final = 1_048_576  # Requests to a local disk are cheap, and small ones save memory.
OBJECT_STAGED_SECONDS_MAX: Final = 86_400  # A staged file that was not written to for a day is left over from a crash.
FOLDERS_REMEMBERED_MAX: Final = 10_000  # A folder that is forgotten costs one more sync of its parent.

# Leases and state documents.
CORRELATION_ID_CHARACTERS_MAX: Final = 128  # It is sent in a header.
NAMES_CACHED_MAX: Final = 65_536  # Valid names that are cached, so that they are not checked again.
NAME_BYTES_MAX: Final = 255  # A file or folder can have such a name, and a few of them fit a key.
LEASE_TTL_SECONDS: Final = 30.0
LEASE_TTL_SECONDS_MAX: Final = 86_400.0  # Renew to hold longer; a crashed holder must not block others for days.
LEASE_WAIT_SECONDS_MAX: Final = 3_600.0
OWNER_BYTES_MAX: Final = 256
STATE_BYTES_MAX: Final = 262_144  # A document; bodies belong in blobs.

# Collections.
COLLECTION_PARTITION_BYTES_MAX: Final = 1_024  # As stored: a zero byte counts twice.
COLLECTION_KEY_BYTES_MAX: Final = 1_024  # As stored: a text has two more bytes, an integer one to nine.
COLLECTION_PATH_BYTES_MAX: Final = 1_472  # Partition and key together: with the longest names they fit a key.
COLLECTION_KEY_ELEMENTS_MAX: Final = 8  # Of a row's key: each element costs time with every read.
COLLECTION_VALUE_BYTES_MAX: Final = 1_048_512  # Of a row; with its version it is one value of the key space.
COLLECTION_CHANGES_MAX: Final = 256  # Of one commit; more would delay other commits.
COLLECTION_COMMIT_BYTES_MAX: Final = 4_128_768  # Of one commit: it fits one message of a stream.
COLLECTION_ROWS_MAX: Final = 1_000  # Rows of one read: it returns a list in memory.
COLLECTION_PAGE_BYTES: Final = 4_194_304  # A page of rows ends when its values have this many bytes.
COLLECTION_READ_BYTES_MAX: Final = 16_777_216  # Of the rows that are read by their keys at a time.
COLLECTION_SCAN_FIRST: Final = 32  # Rows that a scan reads first: with the largest values they still fit in memory.
COLLECTION_SCANNED_MAX: Final = 10_000  # Rows that one scan reads, with those that have expired.
COLLECTION_TTL_SECONDS_MAX: Final = 315_360_000  # Ten years.
COLLECTION_EXPIRED_BATCH: Final = 64  # Expired rows that one transaction removes: its caller waits for that.
COLLECTION_WAIT_SECONDS_MAX: Final = 3_600.0  # For a row to change, as long as a receive of a queue may wait.
COLLECTION_SWEPT_MAX: Final = 100  # Partitions that one read looks at for expired rows.

# LangGraph.
LANGGRAPH_INLINE_BYTES_MAX: Final = 65_536  # Larger channel values are blobs: stored once while they do not change.
LANGGRAPH_BLOB_REUSE_SECONDS: Final = 30.0  # An unchanged value is not put again so long; less than BLOB_TOUCH_SECONDS.
LANGGRAPH_ROW_BYTES_MAX: Final = 393_216  # Of what else a checkpoint has; with its metadata it fits one row.
LANGGRAPH_WRITE_ROWS_MAX: Final = 128  # Rows of one task's writes; with more writes, a row has several.
LANGGRAPH_WRITES_BYTES_MAX: Final = 2_097_152  # Of the rows of one task's writes, which are one commit.
LANGGRAPH_COPY_BYTES: Final = 1_048_576  # A commit of copied rows ends when their values have this many bytes.
LANGGRAPH_PAGE_ROWS_MIN: Final = 16  # Rows of the second page of a history at least; checkpoints of a page of a thread.
LANGGRAPH_PAGE_ROWS_MAX: Final = 256  # Rows of a page of history: its checkpoints are loaded without a pause.
LANGGRAPH_CONFLICTS_MAX: Final = 8  # How often a history that other savers change is read again to delete its old part.
LANGGRAPH_VECTORS_MAX: Final = 10_000  # Vectors that one search compares with its query: they are read from rows.
LANGGRAPH_KEEP_CHECKPOINTS_MAX: Final = 10_000  # Their ids are in the memory of a saver with a retention.
LANGGRAPH_KEEP_DAYS_MAX: Final = 3_650  # Ten years, as for rows of collections.
LANGGRAPH_REMEMBERED_MAX: Final = 1_000  # Threads whose ids a saver with a retention remembers.

# Locks in the process.
LOCK_WAITERS_MAX: Final = 10_000  # Threads and tasks that may wait in one lock table.
LOCK_WAIT_SECONDS: Final = 5.0  # Default wait for a row lock.
LOCK_BULK_WAIT_SECONDS: Final = 10.0  # Default wait for a table lock or a lock on everything, which many may hold.
LOCK_NAME_CHARACTERS_MAX: Final = 512

# Locks that several processes share.
LOCK_LEASE_SECONDS: Final = 10.0  # How long the locks of a crashed process stay, by default.
LOCK_LEASE_SECONDS_MIN: Final = 1.0  # A renewal needs time for a slow sync.
LOCK_LEASE_SECONDS_MAX: Final = 3_600.0
LOCK_CLAIM_PATHS_MAX: Final = 256  # Of one call; one commit writes all of them.
LOCK_SESSION_LOCKS_MAX: Final = 1_024  # Including intents; the record of a session lists them.
LOCK_SESSION_BYTES_MAX: Final = 786_432  # Of the record of a session once all that it waits for is granted; one value.
LOCK_LINE_MAX: Final = 10_000  # Sessions that may wait for one lock.
LOCK_SESSION_ID_CHARACTERS_MAX: Final = 64
LOCK_KEYS_CACHED_MAX: Final = 10_000  # Locks whose keys are remembered: computing them costs as much as a read.
LOCK_OBSTACLES_MAX: Final = 64  # Claims in line that are counted; holders of a lock that a write reads at a time.
LOCK_PAIRS_READ_MAX: Final = 256  # Of one lock on PostgreSQL: small locks are read in one round trip.
LOCK_SESSIONS_ENDED_MAX: Final = 100  # Expired sessions that one commit ends; the next one goes on.
LOCK_COMMIT_BYTES_MAX: Final = 4_194_304  # With this, one commit serves and ends no further session; the next one does.

# Backups of a running plane.
RESTORE_CLOCK_SKEW_MS: Final = 3_600_000  # Lake files this much older than a backup are compared with it, too.
LINEAGE_PARENTS_MAX: Final = 64  # Restores of restores that a plane remembers; older ones are forgotten.
CHECKPOINTS_MAX: Final = 4  # Each keeps disk space that the key space would otherwise have freed.
CHECKPOINT_IDLE_SECONDS: Final = 3_600  # An unused checkpoint is then removed.
STREAMED_LINES_MAX: Final = 1_000  # Lines of a streamed list that are sent at a time,
STREAMED_LINES_SECONDS_MAX: Final = 0.5  # and how long they may be collected, so that a waiting client sees progress.

# Nodes that share a key space.
NODE_HEARTBEAT_SECONDS: Final = 5.0  # How often a node renews its record, and the maintenance lease if it holds it.
NODE_FIRST_SECONDS: Final = 1.0  # A process that opens a plane and is no server has no record before this time.
NODE_RETRY_SECONDS: Final = 1.0  # After a heartbeat that failed.
NODE_GONE_SECONDS: Final = 30.0  # Without a heartbeat for this long, a node is shown as gone,
NODE_FORGOTTEN_SECONDS: Final = 600.0  # and after this time it is not shown any more.
NODES_MAX: Final = 1_000  # Nodes that are listed.
MAINTENANCE_LEASE_SECONDS: Final = 12.0  # Another node does the periodic work this long after a node has died.
BACKGROUND_RETRY_SECONDS: Final = 1.0  # After a background job has failed, doubled with each further failure,
BACKGROUND_RETRY_SECONDS_MAX: Final = 5.0  # up to this.
DUTY_CHECK_SECONDS: Final = 1.0  # How soon the sweepers of a node notice that it does the periodic work from now on.

# Migrations.
MIGRATION_PAGE_PAIRS: Final = 256  # Pairs of one read; a value may have 1 MiB.
MIGRATION_BATCH_PAIRS: Final = 1_000  # Pairs of one transaction,
MIGRATION_BATCH_BYTES: Final = 2_097_152  # and their bytes.
MIGRATION_RANGE_PAIRS: Final = 4_096  # Pairs that one digest compares, and that are copied again if it differs.

# Session logs.
ACTIVITY_FLUSH_SECONDS: Final = 0.2  # How long a record may stay in memory.
ACTIVITY_BUFFER_BYTES_MAX: Final = 1_048_576  # Above this the caller writes the session's records itself.
ACTIVITY_FILE_BYTES_MAX: Final = 67_108_864  # A larger file is closed and rotated into the object store.
ACTIVITY_RECORD_BYTES_MAX: Final = 65_536
ACTIVITY_SESSIONS_MAX: Final = 10_000  # Open session logs of one plane; each has an open file while it is written.
ACTIVITY_IDLE_SECONDS: Final = 600  # An idle session's file is then closed; sooner would make tiny files.
ACTIVITY_NAMES_CHARACTERS_MAX: Final = 160  # Session and kind share a file name of 255 bytes with a time and a hash.
ACTIVITY_COPIES_MAX: Final = 10_000  # Files of one session and kind that begin in one second.
ACTIVITY_RETRY_SECONDS: Final = 60.0  # How soon an upload that the object store rejected is retried.

# The newest BEST_EFFORT values of entities, which reads with best_effort=True add.
BEST_EFFORT_ENTRIES_MAX: Final = 65_536  # Fields in memory; the entity that was not written for longest goes first.
BEST_EFFORT_BYTES_MAX: Final = 33_554_432  # Their values, names and overhead.
BEST_EFFORT_ARRIVED_MAX: Final = 256  # Writes that a reader has to sort in; a writer sorts more in itself.
BEST_EFFORT_LOAD_BYTES_MAX: Final = 33_554_432  # Of session logs that one load reads: as much as memory holds.
BEST_EFFORT_LOAD_FILES_MAX: Final = 1_000  # Of session logs that one load opens.
BEST_EFFORT_FOLLOW_SECONDS: Final = 0.25  # How old the view of other processes' files may be; flushing adds 0.2 s.
BEST_EFFORT_LIST_SECONDS: Final = 5.0  # How often the object store is listed for files of other nodes.
BEST_EFFORT_UNIVERSES_MAX: Final = 4_096  # Universes that are known to be loaded; others are loaded again.

# Entities.
ENTITY_BYTES_MAX: Final = 262_144  # All fields of one entity together.
ENTITY_FIELDS_MAX: Final = 256
ENTITY_WRITES_MAX: Final = 256  # Entities that one tiered transaction may change.
ENTITY_HISTORY_VERSIONS: Final = 1_000  # Changes of an entity that stay readable; older ones are removed.
ENTITY_ATTEMPTS: Final = 10  # Attempts of a change whose entity changes concurrently.
TIER_CACHE_ENTRIES: Final = 16_384  # Fields whose tier a policy caches.

# Queues.
PAYLOAD_INLINE_BYTES_MAX: Final = 16_384  # Larger payloads are stored as blobs.
LEASE_INLINE_BYTES_MAX: Final = 2_048  # Of the messages of a lease; more are stored in a record of their own.
LEASE_CONTENT_BYTES_MAX: Final = 262_144  # Of the messages of a lease; a delivery of more has several leases.
PAYLOAD_CARRIED_BYTES_MAX: Final = 1_024  # Smaller payloads are rewritten with every delivery; larger ones are not.
PAYLOAD_FETCH_BYTES_MAX: Final = 1_048_576  # Blobs up to this size are sent with a delivery; larger ones are streamed.
MESSAGES_MAX: Final = 256  # In one batch of any operation.
WORKER_WINDOW_SECONDS: Final = 0.02  # How soon a worker handles what it has buffered, and acknowledges what is handled.
WORKER_PREFETCH_MAX: Final = 32  # Messages that a worker buffers for each slot by itself; MESSAGES_MAX for all slots.
WORKER_BUFFERED_SECONDS_MAX: Final = 0.5  # A worker whose handlers became slow returns what it has buffered for longer.
WORKER_BATCH_WAIT_SECONDS_MAX: Final = 60.0  # How long a message may wait for its batch; its lease is extended.
WORKER_CANCEL_SECONDS: Final = 0.25  # A worker asks for cancels of messages that it holds for longer: a call a second,
WORKER_CANCEL_WAIT_SECONDS: Final = 1.0  # which quick handlers do not need.
WAITING_CONSUMERS_MAX: Final = 4_096  # The default of queue_max_consumers: a waiting consumer costs a few kilobytes.
LEASED_LIST_MAX: Final = 1_000  # Leased messages in one page.
LEASED_SCAN_MAX: Final = 2_048  # Due entries that one page of leased messages reads.
QUEUE_NAME_CHARACTERS_MAX: Final = 251  # Leaves space for the suffix of the dead-letter queue's name.
TAGS_MAX: Final = 16  # Tags of one message.
TAG_BYTES_MAX: Final = 64
ATTRIBUTES_MAX: Final = 64
ATTRIBUTES_BYTES_MAX: Final = 8_192
PRIORITY_MAX: Final = 9
RATE_MAX: Final = 1_000_000  # Of a queue or a key, in messages per second.
MAX_ATTEMPTS_MAX: Final = 1_000
VISIBILITY_SECONDS_MAX: Final = 43_200.0
DELAY_SECONDS_MAX: Final = 31_536_000.0
TTL_SECONDS_MAX: Final = 31_536_000.0 * 10
RECEIVE_WAIT_SECONDS_MAX: Final = 3_600.0
IDEMPOTENCY_SECONDS: Final = 300  # How long an idempotency key is remembered.
IDEMPOTENCY_KEY_BYTES_MAX: Final = 256
KEY_CHARACTERS_MAX: Final = 256  # Of a key of messages: a host, a tenant, a customer.
KEYS_BATCH_MAX: Final = 64  # Keys that one transaction lets go on after the limits of keys were changed.
RESULT_BYTES_MAX: Final = 16_384  # Larger results are stored as blobs.
RESULT_CHECK_SECONDS: Final = 1.0  # How often a message without `keep_result` is looked up while its result is awaited.
EXPIRY_BATCH_MAX: Final = 256  # Expired results that one transaction deletes.
FIND_ENTRIES: Final = 1_000  # Entries of the due index that one transaction searches for a lease.
ACK_MEMORY_SECONDS: Final = 300  # How long a repeated ack is recognised.
LAST_ERROR_BYTES_MAX: Final = 4_096  # Longer texts are truncated.
PAYLOAD_FILE_SECONDS: Final = 7 * 86_400  # How long a file of `fastness queue get` is kept if no ack removes it.
FAILURES_KEPT_MAX: Final = 100  # Failures that a policy may keep of each message.
HISTORY_PAGE_MAX: Final = 1_000  # Events of a queue's history that one call returns.
FAILURES_BYTES_MAX: Final = 32_768  # Of one message. A batch of 256 that fail or move together fits one transaction.
ERROR_TYPE_BYTES_MAX: Final = 255  # Of a kept failure; longer texts are truncated, and
FAILURE_MESSAGE_BYTES_MAX: Final = 1_024  # of a failure's message the start is kept,
TRACEBACK_BYTES_MAX: Final = 8_192  # of its traceback the end, which names the error.
FAILURES_DELIVERED_BYTES_MAX: Final = 262_144  # Failures in one delivery; then only the newest one of each message.
FAILURES_READ_BYTES_MAX: Final = 4_194_304  # The same for one peek, which also has tracebacks.
RETRY_FACTOR_MAX: Final = 1_000.0
EXTEND_FOR_SECONDS: Final = 3_600.0  # How long a lease is extended automatically while a message is processed.
EVENTS_FLUSH_SECONDS: Final = 0.1  # How often message events are written to the session log.
EVENTS_MAX: Final = 65_536  # Events that may wait in memory for that.
DUE_BATCH_MAX: Final = 64  # Due messages that one transaction processes.
RETENTION_BATCH_MAX: Final = 256  # Records that one transaction of a pass reads for messages that are too old.
RETENTION_PASS_MS_MIN: Final = 1_000  # Between two passes; at least a millisecond for each record that the first read.
RETENTION_PASSES_MIN: Final = 16  # Passes while a message is kept, also if none is known to end.
SEARCH_ENTRIES: Final = 1_000  # Records of a queue that one transaction searches for messages; about 10 ms.
SEARCH_LIST_MAX: Final = 1_000  # Messages in one page of a search.
SEARCH_TEXT_CHARACTERS_MAX: Final = 256  # Of a text that is searched for: a key, an owner, a part of an error.
CONSOLE_PUBLISH_BYTES_MAX: Final = 16_384  # A payload in the form of the console; larger ones need a blob.
COUNTERS_UNFOLDED_MAX: Final = 8  # Processes that have counters of their own in a queue before they are folded.
COUNTERS_FOLDED_MAX: Final = 1_000  # Of which one transaction folds so many.
EXPIRED_KEYS_BATCH_MAX: Final = 1_000  # Expired records of a queue that one transaction of the sweeper deletes.
CLOCK_SET_BACK_MS_MIN: Final = 1_000  # A queue ignores smaller steps back: time servers make them all the time.
ATOMIC_OPERATIONS_MAX: Final = 256  # In one atomic list.
SCHEDULES_MAX: Final = 1_000  # Of one queue.

# Queues of the SQS protocol. The values are those of Amazon SQS, unless a comment says more.
SQS_NAME_CHARACTERS_MAX: Final = 80  # With the suffix .fifo.
SQS_VISIBILITY_SECONDS_MAX: Final = 43_200
SQS_DELAY_SECONDS_MAX: Final = 900
SQS_RETENTION_SECONDS_MIN: Final = 60
SQS_RETENTION_SECONDS_MAX: Final = 1_209_600
SQS_WAIT_SECONDS_MAX: Final = 20
SQS_MESSAGE_BYTES_MIN: Final = 1_024  # Of MaximumMessageSize, which is at most
SQS_MESSAGE_BYTES_MAX: Final = 1_048_576
SQS_KEY_REUSE_SECONDS_MIN: Final = 60
SQS_KEY_REUSE_SECONDS_MAX: Final = 86_400
SQS_POLICY_BYTES_MAX: Final = 8_192
SQS_KEY_ID_CHARACTERS_MAX: Final = 2_048
SQS_SOURCE_QUEUES_MAX: Final = 10  # Named by a RedriveAllowPolicy.
SQS_TAGS_MAX: Final = 50  # Of a queue.
SQS_TAG_KEY_CHARACTERS_MAX: Final = 128
SQS_TAG_VALUE_CHARACTERS_MAX: Final = 256
SQS_LIST_MAX: Final = 1_000  # Queues in one page.
SQS_DELETED_SECONDS: Final = 60  # How long the name of a deleted queue cannot be used again.
SQS_PURGE_SECONDS: Final = 60  # A queue is purged at most once in this time.
SQS_STEPS_MAX: Final = 40  # Batches that a purge or a deletion removes before it answers; the rest follows after it.
MOVE_TASK_RATE_MAX: Final = 500  # Messages per second.
MOVE_TASKS_LISTED_MAX: Final = 10  # Of one queue. As many are kept.
MOVE_TASK_BATCH: Final = 100  # Messages that one transaction moves; each may return to another queue.
MOVE_TASK_SCAN: Final = 256  # Messages that one transaction reads; those that arrived after the start stay.
SQS_WORKER_SECONDS: Final = 10.0  # How long other nodes leave unfinished work to the node that last did a part of it.
SQS_WORK_LISTED_MAX: Final = 1_000  # Unfinished purges, deletions and move tasks that one pass over a universe reads.

# Messages over the SQS endpoint: the quotas of Amazon SQS, unless noted.
SQS_BATCH_ENTRIES_MAX: Final = 10
SQS_BATCH_ID_CHARACTERS_MAX: Final = 80
SQS_RECEIVE_MAX: Final = 10
SQS_ATTRIBUTES_MAX: Final = 10
SQS_ATTRIBUTE_NAME_CHARACTERS_MAX: Final = 256  # Of its data type, too.
SQS_NUMBER_DIGITS_MAX: Final = 38
SQS_TOKEN_CHARACTERS_MAX: Final = 128  # Group ids, deduplication ids and receive attempt ids.
SQS_TRACE_HEADER_CHARACTERS_MAX: Final = 1_024  # Ours: X-Ray's headers have about 200.
SQS_POLICY_ACTIONS_MAX: Final = 7  # Of one AddPermission.
SQS_POLICY_STATEMENTS_MAX: Final = 20
SQS_POLICY_TRIES_MAX: Final = 32  # Ours: of a change of permissions, while other calls change them at the same time.
SQS_ENVELOPE_BYTES_MAX: Final = 8_388_608  # Ours: 1 MiB of control characters and quotes, each escaped with 6 bytes.
SQS_SETTINGS_CACHED_SECONDS: Final = 1.0  # How late a node notices that another one has changed a queue's attributes.
SQS_SETTINGS_CACHED_MAX: Final = 4_096

# Tasks.
TASK_STEPS_MAX: Final = 200  # Calls and groups of a chain, also nested: all that start together fit one commit.
TASK_GROUP_MEMBERS_MAX: Final = 100
TASK_NESTING_MAX: Final = 8  # Groups in groups, and chains of `on_failure`; decoders reject deep nesting.
TASK_GROUP_RESULT_BYTES_MIN: Final = 1_024  # What the document of a group has left for the result of each member.
TASK_JOIN_ATTEMPTS_MAX: Final = 200  # Attempts to add a result to a group: each fails because another one succeeded.
TASK_JOIN_PAUSE_SECONDS_MAX: Final = 0.1  # Between these attempts, with full jitter.
TASK_DEFER_SECONDS: Final = 1.0  # How soon a task runs again whose outcome could not be committed.

# Mail.
MAIL_BYTES_MAX: Final = 65_536  # Of an envelope's body.
MAIL_TTL_SECONDS: Final = 7 * 86_400.0
MAIL_TTL_SECONDS_MAX: Final = 10 * 365 * 86_400.0
MAIL_ID_CHARACTERS_MAX: Final = 64
MAIL_BATCH_MAX: Final = 256  # Mails in one send, read or confirmation.
MAIL_WAIT_SECONDS_MAX: Final = 20.0
MAILBOX_MAILS_MAX: Final = 1_000  # Mails that wait in one mailbox, unless its universe's policy sets another limit.
MAILBOX_MAILS_LIMIT_MAX: Final = 1_000_000
MAIL_SWEEP_SECONDS: Final = 300.0
MAIL_SWEEP_BATCH: Final = 256  # Mails, and receipts, that one sweep transaction removes.
MAIL_EXPIRED_UNCOUNTED_MAX: Final = 1_024  # Expired mails that a count leaves out; the sweeper removes more than that.
MAIL_SWEEP_MAILBOXES: Final = 16  # Mailboxes that one sweep transaction checks.
MAIL_SWEEPS_MAX: Final = 1_000  # Transactions of one sweep of a universe; the next sweep continues.
RECEIPTS_MAX: Final = 10_000  # Receipts kept for a sender; the oldest are removed first.
BLOCKS_MAX: Final = 1_000  # Senders that one mailbox blocks.
AGENT_KEY_BYTES: Final = 32
CONTENT_TYPE_CHARACTERS_MAX: Final = 256

# Disk space and failed databases.
DISK_RESERVE_BYTES_MIN: Final = 67_108_864  # By default, new data is refused below a tenth of the disk: at least this,
DISK_RESERVE_BYTES_MAX: Final = 402_653_184  # and at most this, in which a flush and the largest merge of tables fit.
DISK_RESERVE_SHARE_MAX: Final = 0.25  # A reserve is never more than this share of the file system.
DISK_CHECK_SECONDS_MIN: Final = 0.05  # The space is checked sooner, the less there is above the reserve,
DISK_CHECK_SECONDS_MAX: Final = 5.0  # and at least this often.
DISK_FILL_BYTES_PER_SECOND: Final = 1_073_741_824  # How fast a disk is assumed to fill between two checks.
COMPACT_DELETED_SECONDS: Final = 60.0  # How often the key space of a directory is checked for space to free.
COMPACT_DELETIONS_MIN: Final = 4_096  # Fewer deletions are left to RocksDB: they free 64 MiB at most.
COMPACT_REWRITES_MAX: Final = 8  # Pairs that may be rewritten for each deletion, to free its space.
COMPACT_BYTES_MAX: Final = 1_073_741_824  # Rewritten at a time: closing a directory waits for it.
COMPACT_TIGHT_SECONDS: Final = 1.0  # How often space is freed while the disk is nearly full.
COMPACT_TIGHT_REWRITES_MAX: Final = 256  # Pairs that may be rewritten for each deletion then.
MEMTABLES_PER_DISK: Final = 128  # Memtables that the file system would hold: tables and merges are in proportion.
MEMTABLE_BYTES_MIN: Final = 524_288  # Of a memtable on a small disk.
MEMTABLE_BYTES_MAX: Final = 33_554_432  # Of a memtable on a large disk: the logs that opening replays grow with it.
REOPEN_SECONDS_MIN: Final = 0.5  # A server's back-off between attempts to reopen a failed key space doubles from this
REOPEN_SECONDS_MAX: Final = 30.0  # up to this.

# Ingress.
INGRESS_QUEUE_MAX: Final = 4_096  # Accepted pushes that wait for the writer.
INGRESS_QUEUE_BYTES_MAX: Final = 67_108_864  # And the total size of their bodies.
INGRESS_WAIT_SECONDS: Final = 0.02  # How long a push waits for space in the queue before it fails with Busy.
INGRESS_BATCH_MAX: Final = 256  # Pushes of one commit.
INGRESS_BATCH_BYTES_MAX: Final = 2_097_152  # And the total size of their bodies: half of what one batch may write.
INGRESS_FLUSH_SECONDS: Final = 0.2  # How long the first push of a batch waits for others.
INGRESS_STORE_SECONDS: Final = 2.0  # A batch that is not committed by then fails.
INGRESS_EXIT_SECONDS: Final = 10.0  # How long the end of a program waits for an event loop that still runs.
INGRESS_LAG_SECONDS: Final = 1.0  # A writer that lags more logs a warning.
INGRESS_LOG_SECONDS: Final = 1.0  # How often the same warning is logged while it lasts.
INGRESS_FULL_SECONDS: Final = 1.0  # How long a full mailbox is assumed to still be full.
DEDUPE_SECONDS: Final = 7 * 86_400.0  # How long the key of a push is remembered.
DEDUPE_MAX: Final = 10_000  # Keys that are remembered; the oldest are removed first.
DEDUPE_PRUNE_SECONDS: Final = 1.0  # How often expired keys are removed.
DEDUPE_SNAPSHOT_SECONDS: Final = 5.0  # How often new keys are saved.
PUSHES_PER_MINUTE: Final = 120  # Per peer, by default.
PUSHES_PER_MINUTE_MAX: Final = 100_000_000
PUSH_PEERS_MAX: Final = 10_000  # Peers whose pushes are counted; the one that was idle longest is evicted first.
PUSH_PAYLOAD_BYTES_MAX: Final = 131_072  # Before base64, which makes 174,763 characters of it.
PUSH_TEXT_CHARACTERS_MAX: Final = 256  # Of a topic, a key, a session or a reply-to.
PUSH_BATCH_MAX: Final = 256  # Pushes of one request: what one commit of the writer stores.
PUSH_BATCH_BYTES_MAX: Final = 1_048_576  # And the total size of their payloads: base64 and all, one commit stores it.
PUSH_RECENT_MAX: Final = 1_024  # Pushes of one watched universe that are remembered for its watches.
PUSH_RECENT_BYTES_MAX: Final = 4_194_304  # And their total size.
PUSH_RECENT_SECONDS: Final = 300.0  # How long a universe is remembered after its last watch has asked.
PUSH_UNIVERSES_MAX: Final = 16  # Watched universes: with the bound above, 64 MiB.
PUSH_WATCHES_MAX: Final = 1_000  # Watches that wait at the same time; each push wakes those of its universe.
PUSH_WATCH_MAX: Final = 256  # Pushes of one answer to a watch.
PUSH_WATCH_BYTES_MAX: Final = 1_048_576  # And their total size: a quarter of a frame.
PUSH_WATCH_SECONDS_MAX: Final = 20.0  # How long one request of a watch waits, as a read of mail does.
RPC_BYTES_MAX: Final = 262_144  # One JSON-RPC request, or one batch of them.
RPC_BATCH_MAX: Final = 64  # Calls of one JSON-RPC batch.

# The Model Context Protocol.
MCP_BODY_BYTES_MAX: Final = 4_194_304  # Of a request: a blob of 1 MiB in base64, with a margin.
MCP_SESSIONS_MAX: Final = 4_096  # Sessions of revision 2025-11-25; each takes some 50 KiB of memory,
MCP_SESSIONS_PER_TOKEN_MAX: Final = 1_024  # and those of one token, so that one token cannot use all of them.
MCP_SESSION_IDLE_SECONDS: Final = 1_800.0  # Without a request and without an open stream. The client opens another.
MCP_SUBSCRIPTIONS_MAX: Final = 64  # Of one session or stream.
MCP_STREAMS_MAX: Final = 1_024  # Streams of notifications of revision 2026-07-28,
MCP_STREAMS_PER_AGENT_MAX: Final = 64  # and those of one agent, so that one agent cannot use all of them.
MCP_WATCHED_MAX: Final = 4_096  # Resources that are watched at the same time; subscribers of the same one share it.
MCP_WATCH_SECONDS: Final = 0.2  # How often a server looks for changes: the most notifications of one resource.
MCP_LIST_SECONDS: Final = 1.0  # And for changes of a list, of which up to 1,000 names are read.
MCP_POLL_SECONDS: Final = 2.0  # How often subscribed resources are read over stdio, where nothing can be watched.
MCP_CHECK_SECONDS: Final = 30.0  # How often it is checked that a silent subscriber still exists and is allowed.
MCP_LISTED_NAMES_MAX: Final = 1_000  # Names of each list that are compared to find changes of it.
MCP_CONTENT_BYTES_MAX: Final = 49_152  # Bodies of one answer together: about 15,000 tokens of a model's context.
MCP_WAIT_SECONDS_MAX: Final = 20.0  # One call waits no longer: clients give up after about a minute.
MCP_LEASE_SECONDS_MIN: Final = 30.0  # A model needs about this long between two calls.
MCP_LEASE_SECONDS_MAX: Final = 3_600.0  # What a model that forgets its lease may block.
MCP_MESSAGE_LEASE_SECONDS: Final = 300.0  # A job of a few calls of a model; then another agent gets the message.
MCP_LEASE_SECONDS: Final = 600.0  # Of a reservation: an edit with its tests.
MCP_LEASE_KEYS_MAX: Final = 32  # Of one call; each is a call of the plane.
MCP_RECEIVE_MAX: Final = 10  # Messages of one call: a model works on one after the other, while their leases run.
MCP_MAILS_MAX: Final = 50  # Mails that one call reads or confirms.
MCP_LIST_MAX: Final = 100  # Names of one page.
MCP_ENTRIES_MAX: Final = 50  # Records of a world that one call reads or appends.
MCP_DEAD_LETTERS_SCANNED_MAX: Final = 1_000  # That one search reads: they are in memory all at once.
MCP_ERROR_CHARACTERS_MAX: Final = 500  # Of each error in a list; queue_status has all of it.
MCP_BLOB_BYTES_MAX: Final = 1_048_576  # Of a blob that one call stores; larger ones are written over HTTP.

# The relay.
RELAY_AUTHENTICATE_SECONDS: Final = 10.0  # How long an agent may take to answer the challenge.
RELAY_PING_SECONDS: Final = 25.0  # A connection that was silent for this long is pinged.
RELAY_PONG_SECONDS: Final = 7.0  # And closed if it does not answer by then.
RELAY_FLUSH_MAILS: Final = 50  # Mails that one read returns from a mailbox.
RELAY_FLUSH_BYTES: Final = 131_072  # And their bytes, if more than one.
RELAY_IN_FLIGHT_MAX: Final = 256  # Mails that a connection was sent and has not confirmed.
RELAY_UNSENT_BYTES_MAX: Final = 131_072  # Unread frames of a slow reader before its mailbox is no longer read.
RELAY_RECEIPTS: Final = 256  # Receipts that one read returns.
RELAY_RECEIPTS_SECONDS: Final = 0.1  # How long receipts that other processes wrote may wait for more.
RELAY_FRAMES_MAX: Final = 1_024  # Frames in one message of an agent.
RELAY_SENDS_MAX: Final = 256  # Unstored mails of one connection; above this it is not read.
RELAY_SENDS_BYTES_MAX: Final = 1_048_576
RELAY_CONFIRMS_MAX: Final = 4_096  # Mails that one connection has confirmed and that are not removed yet.
RELAY_BATCH_MAILS: Final = 256  # Mails sent, confirmed or read in one commit; more would delay other commits.
RELAY_BATCHES_IN_FLIGHT_MAX: Final = 4  # Commits that are being synced while the next one is made.
RELAY_RETRY_SECONDS: Final = 1.0  # How soon a failed operation is retried.
RELAY_POLL_SECONDS: Final = 300.0  # How often a mailbox is read without a notification.
RELAY_RATE_PER_SECOND: Final = 100.0  # Mails of one sender, on a network address.
RELAY_BURST: Final = 200  # Mails that may arrive at once.
RELAY_SENDERS_MAX: Final = 65_536  # Senders whose rate is tracked; the one that was idle longest is evicted first.

# The pipeline.
VIEW_LOCK_WAIT_SECONDS_MAX: Final = 60.0  # How long views of one directory, or of one server, may wait for each other,
VIEW_RETRY_SECONDS: Final = 1.0  # and for a command that has it open.
VIEW_OBJECTS_IN_FLIGHT: Final = 16  # Manifests, or segments that a server sends, that are read concurrently.
MANIFESTS_CACHED_MAX: Final = 65_536  # Session log manifests that a process caches: they never change.
CHUNK_ENTRIES: Final = 8_192  # Hot records that are staged together for an executor to read,
CHUNK_BYTES: Final = 8_388_608  # and their bytes.
CHUNK_PAGE: Final = 256  # Hot records of one read of the key space; each may have 256 KiB.
ROWS_BATCH: Final = 8_192  # Rows of one Arrow batch,
ROWS_BATCH_BYTES: Final = 8_388_608  # and the bytes of their records.
SOURCE_PARTITION_ROWS: Final = 65_536  # Journal rows that one task reads: a task costs as much as 10,000 rows.
SOURCE_FILE_BYTES: Final = 8_388_608  # Bytes of session logs that one task reads.
SOURCE_STAGED_SECONDS: Final = 86_400  # How long staged data is kept after its last use.
LOAD_BATCH_ROWS: Final = 128  # Rows of a bulk load in one commit: with its key, each is two operations.
LOAD_BATCH_BYTES: Final = 1_048_576  # And their bytes: a quarter of a frame.
LOAD_LOOKUP_THREADS: Final = 16  # Threads that look up which rows were already written; a server batches their calls.

# The lake.
LAKE_ROW_GROUP_ROWS: Final = 65_536  # The unit that a reader skips or reads as a whole.
LAKE_ROW_GROUP_BYTES: Final = 33_554_432  # Records may be large; this bounds the memory of a writer per file.
LAKE_FILE_BYTES: Final = 33_554_432  # Target size of compacted files; one of them is sorted in memory.
LAKE_SMALL_FILE_BYTES: Final = 16_777_216  # Files below this are worth compacting.
LAKE_FILES_MIN: Final = 4  # Small files needed for a compaction: fewer would rewrite the same rows too often.
LAKE_WRITERS_MAX: Final = 32  # Files that one task has open, one for each partition: a universe, or a day of one.
LAKE_WRITER_BYTES: Final = 134_217_728  # Rows that one task buffers for all of its open files.
LAKE_KEEP_HOURS: Final = 168  # How long unreferenced files are kept: a reader, or a slow run, may still use them.
LAKE_WATERMARK_FILES: Final = 16  # Files with moved watermarks; then all watermarks of a table are written again.
LAKE_ATTEMPTS: Final = 32  # Attempts of a run that conflicts with another before it fails with a Conflict.
LAKE_PAUSE_MS_MAX: Final = 1_000  # Back-off doubles from 10 ms up to this, with full jitter.

# Audits, roll-ups and reports.
AUDIT_TASK_BYTES: Final = 67_108_864  # What one executor audits at a time; a world is never split.
AUDIT_WORLDS_MAX: Final = 4_096  # Worlds of one wave: each takes some kilobytes in the driver.
FINDINGS_PER_WORLD_MAX: Final = 100  # The first findings show what happened; more would repeat it.
STATE_REPORTED_BYTES_MAX: Final = 1_048_576  # A larger state is reported by its digest only.
SCAN_TASK_BYTES: Final = 268_435_456  # Segments, logs and blobs that one executor searches for hashes at a time.
BLOB_GRACE_SECONDS: Final = 86_400.0  # A younger blob may be about to be referenced by the process that stored it.
SIGNATURE_CHARACTERS_MAX: Final = 200  # Of an error's signature: later text rarely matters.
REPORT_DAYS: Final = 14  # Days whose hours a report plots.
REPORT_ROWS: Final = 15  # Rows of each table in a report: the lake has all of them.
REPORT_QUEUES_PLOTTED: Final = 4  # Each in its own plot.
REPORT_GRID: Final = 12  # Agents on each axis of the communication grid.
MESSAGES_MEASURED: Final = 1_000_000  # Messages of a universe that a roll-up compares with the logs,
ERROR_CHARACTERS_MEASURED: Final = 500  # and how much of each error: they are in memory all at once.
HISTORY_OVERLAP_MS: Final = 60_000  # Events this much older than the last ingested one may still be committed.
LOG_SETTLE_SECONDS: Final = 1.0  # Events of a commit are in the files of its node after this time.
ROLLUP_BUCKET_EVENTS: Final = 131_072  # Events that one executor holds in memory; those of a message stay together.
ROLLUP_NEW_EVENTS: Final = 1_048_576  # New events that the driver adds to a roll-up; for more, Spark rebuilds it.
ROLLUP_NEW_SHARE: Final = 0.25  # Of all events; with a larger share of new ones, Spark rebuilds a large table.
ROLLUP_INLINE_ROWS: Final = 4_194_304  # Messages that the driver aggregates; executors aggregate more.
ROLLUP_FILE_ROWS: Final = 131_072  # Messages in a file: one late event rewrites a whole file.
ROLLUP_SMALL_FILE_ROWS: Final = 16_384  # Files with fewer rows are small,
ROLLUP_SMALL_FILES: Final = 16  # and a roll-up merges them when a universe has this many.
INGEST_TASK_BYTES: Final = 33_554_432  # What one executor ingests at a time; a commit has one such task per core.
INGEST_CHUNK_BYTES: Final = 4_194_304  # Of one world, so that a large world is not limited to one core.
INGEST_WORLDS_MAX: Final = 4_096  # Worlds, and log files, of one commit: each moves a watermark.
INGEST_WHOLE_LOGS_MIN: Final = 64  # Ingested log files that were rotated since, for a commit without rows to note it.
INGEST_WORLD_ROWS: Final = 131_072  # Rows of one world in one commit; hot rows are staged.
INGEST_CHANGES: Final = 65_536  # Entity changes in one commit. The driver itself writes them.
INGEST_CARRIED_BYTES: Final = 65_536  # Hot records of one world are sent with their task up to this size,
INGEST_CARRIED_BYTES_MAX: Final = 8_388_608  # and those of one commit up to this; others go to the object store.
INGEST_INLINE_BYTES_MAX: Final = 1_048_576  # Below this, a follow run ingests in the driver: executors start slowly.
INGEST_FOLLOW_SECONDS: Final = 5.0  # Pause of a follow run between two polls.
INGEST_REPAIR_SECONDS: Final = 300.0  # How often it checks whether damaged data is readable again.
LIVE_EVERY_SECONDS: Final = 10.0  # Pause of a live query between two polls: each takes a snapshot of the plane.
LIVE_LATE_SECONDS: Final = 600.0  # A minute is final when the newest event is later than its end by this much.
LIVE_LATE_SECONDS_MAX: Final = 604_800.0  # Minutes that are not final are written again with every batch.
LIVE_RESTARTS_MAX: Final = 8  # Restarts of a live query without a finished batch between them,
LIVE_RESTART_SECONDS_MAX: Final = 30.0  # with a pause that doubles up to this.
LIVE_STATUS_SECONDS: Final = 1  # How often it looks whether it is to end.
FOLLOW_STALL_SECONDS: Final = 900.0  # Without a sign of progress for this long, a follow run needs a restart.
HEALTH_CONNECTIONS_MAX: Final = 32  # Concurrent health checks of a follow run.
RUN_RECORD_SECONDS: Final = 30.0  # How often a follow run writes its record into the lake.
RUN_ERROR_CHARACTERS: Final = 1_000  # Of the error in the record of a run.
LINEAGE_SECONDS: Final = 5.0  # How long a job waits for a lineage server to take an event.
INGEST_COMPACT_FILES: Final = 64  # And whether enough small files exist to be worth compacting.
FINDINGS_MAX: Final = 1_000  # Findings that are reported; the quarantine has all of them.

# Hosting.
HOST_LEASE_SECONDS: Final = 10  # How long a claim on a world lasts: its worlds continue on another host after that.
HOST_LEASE_SECONDS_MAX: Final = 3_600.0  # The worlds of a host that died wait for so long.
HOSTED_WORLDS_MAX: Final = 256  # One claim returns a list in memory.
HOST_CLAIM_BATCH: Final = 16  # Worlds that one transaction claims, renews or gives back: it locks all of them.
HOST_CLAIM_BYTES_MAX: Final = 1_048_576  # Of the items that one claim returns: a quarter of a frame.
HOST_PROGRAMS_MAX: Final = 256  # Programs of one claim: each is one scan.
HOST_WAIT_SECONDS_MAX: Final = 20  # As long as a receive of a queue may wait.
TURN_ITEMS_MAX: Final = 256  # Items that a claim returns with a world; a turn takes at most one batch.
TURN_REQUESTS_MAX: Final = 256  # Effects, and timers, of one turn: each is several keys.
TURN_DELAY_SECONDS: Final = 0.2  # After the first failure of a turn; it doubles,
TURN_DELAY_SECONDS_MAX: Final = 60  # up to this.
EMITTED_MAX: Final = 127  # Messages, mails and so on of one event: those of two fit one atomic commit with its turn.
EMITTED_BYTES_MAX: Final = 1_048_576  # Of one event: those of a few fit one message of a stream.
SEND_BYTES_MAX: Final = 49_152  # Of a send to another universe, which has no blob; the rest of an item needs space.
SEND_UNIVERSES_MAX: Final = 256  # Of each list of a universe's policy, which every send to another universe reads.
HOST_CONCURRENCY_MAX: Final = 10_000  # Turns of a host at a time, and adapters.
HOST_WORLDS_MAX: Final = 1_024  # Worlds that a host holds, with their states in memory.
ASIDE_ERROR_BYTES_MAX: Final = 8_192  # A traceback is cut to this.
EFFECT_LEASE_SECONDS: Final = 30
EFFECT_ATTEMPTS: Final = 5  # How often an effect is tried that does not say so.
EFFECT_ATTEMPTS_MAX: Final = 1_000
EFFECT_CLAIMS_MAX: Final = 128  # A claim locks the worlds of its effects, which may all be different ones.
EFFECT_KINDS_MAX: Final = 256  # One claim reads the due index of each kind.
EFFECT_KIND_BYTES_MAX: Final = 256  # It is part of a key.
EFFECT_PARAMS_BYTES_MAX: Final = 65_536  # As an inbox item with all its effects.
EFFECT_ERROR_BYTES_MAX: Final = 1_024  # A longer error is cut; the receipt of a dead effect has it.
EFFECT_LEASE_SECONDS_MAX: Final = 86_400  # A holder that needs longer extends it.
EFFECT_DELAY_SECONDS_LONGEST: Final = 86_400  # That a caller may choose for the next attempt.
EFFECT_ARCHIVED_SECONDS: Final = 300  # How soon a claim looks at an effect of an archived world again.
EFFECT_DELAY_SECONDS: Final = 1  # After the first failure; it doubles,
EFFECT_DELAY_SECONDS_MAX: Final = 300  # up to this.
TIMER_BATCH: Final = 64  # Timers that one transaction fires; each may be of another world.
TIMER_LATE_SECONDS: Final = 5  # A timer that is later than this is fired by any node, not only by the one on duty.
RUN_ID_BYTES_MAX: Final = 200  # The world of a child adds to the id of its parent.
RUN_VALUE_BYTES_MAX: Final = 49_152  # Longer arguments, signals and results are blobs; the rest of an item needs space.
RUN_ERROR_BYTES_MAX: Final = 8_192  # An error of a run is cut to this; as a traceback that is set aside.
RUN_REASON_BYTES_MAX: Final = 1_024  # Why a run is cancelled.
RUN_WAIT_SECONDS_MAX: Final = 20.0  # As long as a receive of a queue may wait.
RUNS_SCANNED_MAX: Final = 1_000  # Runs of a state that one page reads to find those of a workflow.
RUNS_LISTED_MAX: Final = 1_000
RUNS_SWEPT: Final = 100  # Running runs that a claim of a host checks: whether they still have something to wait for.
RUN_SWEEP_SECONDS: Final = 5  # How often the claims of one process check that, in each universe.
RUN_CALLS_MAX: Final = 100_000  # Of a generation of a run: its history is kept in memory, and replayed by a restore.
RUN_RESULT_BYTES_MAX: Final = 65_536  # Of a recorded step: a history is a list of small values. Longer ones are blobs,
RUN_BLOB_BYTES_MAX: Final = 67_108_864  # which a host writes and reads as a whole, in memory.
RUN_TIMERS_MAX: Final = 1_000  # That are removed when a run ends; any others fire into an inbox that is not read.
MCP_LINE_BYTES_MAX: Final = 8_388_608  # Of a message over stdio: a blob of 1 MiB as base64 in JSON, and much to spare.
MCP_LINES_BUFFERED: Final = 16  # Messages over stdio that were read and not yet taken; the client waits then.
MCP_PAGE: Final = 100  # Resources of one page: what a client shows at once.
MCP_URI_CHARACTERS_MAX: Final = 2_048  # Of a resource: two names, each of whose characters may be three.
MCP_DEAD_LETTERS_SHOWN: Final = 20  # In a resource; a tool searches the others.
MCP_ENTRIES_SHOWN: Final = 20  # Of a world's journal in its resource: the last ones.
MCP_MAILS_SCANNED_MAX: Final = 1_024  # Of a mailbox, to find its threads: four calls.
MCP_COMPLETIONS_MAX: Final = 100  # The protocol allows no more.


# The SQS protocol.
SQS_BODY_BYTES_MAX: Final = 4_194_304  # Of a request: 1 MiB of messages, of which each byte may be three in a form.
SQS_MALFORMED_ESCAPES_MAX: Final = 10_000  # Percent signs of a form that begin no escape; correct clients send none.
SQS_FORM_FIELDS_MAX: Final = 4_096  # Ten messages with ten attributes each have 450.

# Tasks of MCP.
MCP_EXPOSED_TOOLS_MAX: Final = 100  # Of a universe. More tools than this confuse a model, and each list has them all.
MCP_SCHEMA_BYTES_MAX: Final = 32_768  # Of a tool's arguments, its result or a question; a model reads it as text.
MCP_SCHEMA_DEPTH_MAX: Final = 64  # Validators recurse.
MCP_VALIDATION_SECONDS: Final = 1.0  # CPU time of a thread that compares a value with a schema: some 50,000 items.
MCP_PATTERN_CHARACTERS_MAX: Final = 16_384  # Of a text that has a pattern: the slowest patterns take 15 us for each.
MCP_UNEVALUATED_MAX: Final = 1_000  # Members of a value with unevaluatedItems or -Properties: quadratic time.
MCP_TOOL_DESCRIPTION_CHARACTERS_MAX: Final = 4_096  # A model reads it with every list of tools.
MCP_QUESTIONS_MAX: Final = 32  # Of one task; every status has the open ones.
MCP_QUESTION_CHARACTERS_MAX: Final = 4_096  # A person reads it in a form.
MCP_STATUS_CHARACTERS_MAX: Final = 1_024  # Of the text of a progress report, which every poll returns.
MCP_TASK_ID_CHARACTERS_MAX: Final = 512  # A queue's name, a point and an id; or the id of a run.
MCP_TASK_ROWS_SECONDS: Final = 604_800.0  # How long progress, questions and answers are kept after they were written.
MCP_TASK_POLL_SECONDS: Final = 1.0  # How often a waiting call looks at the progress; clients are told to poll so often.
MCP_TASK_WAIT_SECONDS: Final = 50.0  # One call waits so long for a task: common clients give up after 60 s.
MCP_ANSWER_DELAY_SECONDS: Final = 60.0  # A job that asks is delivered again so late, if no answer causes it before.
MCP_RESULT_BYTES_MAX: Final = 1_048_576  # Of a task's result that a client gets; it has to fit one frame.
AGENT_RECORD_BYTES_MAX: Final = 65_536  # Of a recorded operation of an agent; a larger result is stored as a blob.
AGENT_OPERATIONS_MAX: Final = 10_000  # Of one run of an agent: a restart reads them all, and an endless loop ends.
AGENT_OUTPUT_BYTES_MAX: Final = 4_194_304  # Of an agent's output, as of one message of a stream.

# Stores of agent frameworks.
ADAPTER_PAGE_ROWS: Final = 100  # Rows of a page of all rows, or names of a page of all partitions.

# The result backend of Celery.
CELERY_WAIT_SECONDS: Final = 20.0  # One call waits so long for a result, and is then repeated.
CELERY_GATHER_SECONDS_MAX: Final = 0.05  # The pause of a caller that waits for many results, so that one call has more.
CELERY_CHORD_SEND_SECONDS: Final = 5.0  # A last part that runs again waits so long for its first run to send the body.
CELERY_CHORD_DONE_SECONDS: Final = 86_400  # A chord that is done is remembered for parts that run again.

# Sessions of agent frameworks.
SESSION_ATTEMPTS_MAX: Final = 64  # Of a write that other writers of the session keep overtaking: about five seconds.
SESSION_BACK_OFF_SECONDS_MAX: Final = 0.1  # Back-off doubles from 1 ms up to this, with full jitter.
SESSION_INLINE_BYTES_MAX: Final = 65_536  # A larger value of a row is a blob.
SESSION_COMMIT_BYTES_MAX: Final = 3_145_728  # Values of one commit; the rest of its message is for the keys.
SESSION_COMMIT_ROWS_MAX: Final = 255  # Rows of items in one commit, beside the row that counts them.
SESSION_CLEARED_SECONDS: Final = 86_400  # A cleared session keeps its count for slower writers; then nothing is left.

# The console.
LEASE_CALLERS_SHOWN: Final = 10  # Waiting callers of a lease that are named; the others are counted.
SURVEY_NAMES_MAX: Final = 2_000  # Names that one search of queues reads: about 40 ms, and 0.5 s on PostgreSQL.

# The audit log.
AUDIT_ENTRIES_MAX: Final = 1_000_000  # Of a universe, and of the plane itself: 350 bytes each. The oldest is replaced.
AUDIT_KEEP_SECONDS: Final = 7_776_000  # 90 days, which common rules ask for; `audit_keep_seconds` changes it.
AUDIT_TEXT_BYTES_MAX: Final = 512  # Of the target and of the detail of an entry; what is longer is cut.
AUDIT_LISTED_MAX: Final = 1_000  # Entries of one page.
AUDIT_SCANNED_MAX: Final = 1_000  # Entries that one page reads to find those that match.
AUDIT_EXPIRY_BATCH: Final = 1_000  # Entries that one transaction deletes.
AUDITED_CALLS_MAX: Final = 10_000  # Of one process at a time: they run to their end even if their callers leave.
AUDIT_CLOSE_SECONDS: Final = 1.0  # A plane that closes waits so long for them; entries of the others stay as started.
AUDIT_REFUSALS_PER_MINUTE: Final = 60  # Refused calls that a server records: a caller must not fill the log with them.

# The history of samples.
HISTORY_SECONDS: Final = 86_400  # A day; `history_seconds` changes it.
HISTORY_FINE_SECONDS: Final = 10  # Between two samples of the ring of an hour,
HISTORY_FINE_SAMPLES: Final = 360  # which has so many.
HISTORY_COARSE_SECONDS: Final = 60  # Between two samples of the ring of a day,
HISTORY_COARSE_SAMPLES: Final = 1_440  # which has so many.
HISTORY_QUEUES_MAX: Final = 100  # Queues in a sample, those with the most messages; about 60 bytes each.
HISTORY_UNIVERSES_MAX: Final = 32  # Universes in a sample.
HISTORY_RECORD_BYTES_MAX: Final = 65_536  # Of a sample: all of a server are at most 118 MB.
HISTORY_NODES_MAX: Final = 32  # Servers whose samples one chart adds up.
HISTORY_POINTS_MAX: Final = 720  # Points of a chart that the server sends; a screen shows no more.
HISTORY_FORGOTTEN_SECONDS: Final = 172_800  # The samples of a server that stored none for so long are deleted.

# Quotas of universes.
QUOTAS_MAX: Final = 10_000  # Every server keeps them in memory.
QUOTA_COUNT_MAX: Final = 1 << 53  # Of messages, bytes or connections: what JSON numbers carry exactly.
QUOTA_RATE_MIN: Final = 0.001  # One call in a quarter of an hour; a lower rate would never be used.
QUOTA_RATE_MAX: Final = 1_000_000.0  # As of a token.
QUOTA_MEASURE_SECONDS: Final = 5.0  # Messages are counted so often, and quotas set elsewhere are known so soon.
QUOTA_REFUSED_MEASURE_SECONDS: Final = 0.25  # After a refusal, if measurements are cheap: calls are repeated then.
QUOTA_BYTES_MEASURE_SECONDS: Final = 60.0  # Bytes are measured so often: that reads all of the universe.
QUOTA_MEASURE_SHARE: Final = 20  # A measurement that took 1 s is not repeated for 20 s: at most 5 % of one processor.
QUOTA_MEASURE_FREE_SECONDS: Final = 0.002  # One that took no longer may be repeated at once: about 90 queues.
QUOTA_FIRST_MEASURE_PAIRS: Final = 20_000  # Bytes of a universe with more are first measured by the thread: 25 ms.
QUOTA_MEASURED_LATELY_MAX: Final = 100  # Universes without quotas whose last measurements are kept.
QUOTA_ADDITIONS_MAX: Final = 256  # Transactions whose additions are kept apart; the older ones are summed.
QUOTA_CALLER_SECONDS: Final = 60.0  # What a caller's own transaction adds counts so long, as it may commit late.
QUOTA_RETRY_SECONDS: Final = 1.0  # After a refusal; by then it was measured again.
SIZE_PAIRS: Final = 50_000  # One statement of PostgreSQL adds up so many pairs: well below its time limit.
QUOTAS_METRICS_MAX: Final = 100  # Universes with quotas in the metrics: each has up to 12 series.

# `fastness top`.
TOP_REFRESH_SECONDS: Final = 1.0  # Between two samples; a server answers one in milliseconds.
TOP_REFRESH_SECONDS_MIN: Final = 0.1  # People cannot read faster.
TOP_REFRESH_SECONDS_MAX: Final = 3_600
TOP_ROWS_MAX: Final = 200  # Queues that one sample reads: more do not fit a screen.
TOP_PAGE: Final = 100  # Queues of one call.
TOP_WAITS_MAX: Final = 100  # Waits that one sample reads: one call returns no more.
TOP_KEY_SECONDS: Final = 0.25  # How long a keypress is awaited before the screen is drawn again.

# Encryption at rest.
ENCRYPTION_KEYS_MAX: Final = 500  # Data keys of a universe: all of them fit one value, in which they are stored.
ENCRYPTION_WRAPPED_BYTES_MAX: Final = 1_024  # Of a wrapped data key. Those of AWS KMS have 184 bytes.
ENCRYPTION_UNIVERSES_MAX: Final = 4_000  # Encrypted universes of a plane: one scan reads the records of all of them.
ENCRYPTION_SALTS_CACHED: Final = 4_096  # Derived keys in memory; each process that writes has one for each universe.
ENCRYPTION_VALUES_PER_SALT: Final = 1 << 32  # Then a process derives a new key, long before AES-GCM needs one.
ENCRYPTION_FRAME_BYTES: Final = 65_536  # Objects are encrypted in frames, so that a range reads only its frames.
ENCRYPTION_REWRITE_PAGE: Final = 64  # Values that a rewrite reads at a time: at most 64 MiB in memory.
ENCRYPTION_REWRITE_CALL: Final = 2_048  # Values that one call of a rewrite looks at: a call takes a second at most.
ENCRYPTION_REWRITE_BYTES: Final = 4_194_304  # Of one transaction of a rewrite.
ENCRYPTION_REWRITE_OBJECTS: Final = 16  # Objects that one call of a rewrite looks at.
ENCRYPTION_COMMAND_SECONDS: Final = 10.0  # How long the command for keys may run; transactions may wait for it.
ENCRYPTION_KEY_FILE_BYTES_MAX: Final = 1_048_576  # Of a key file; a longer one is another kind of file.
ENCRYPTION_LOCK_SECONDS: Final = 30.0  # How long `enable` and `rotate` wait for transactions of `plane.within`.

# SQS access keys, and the queues of a token.
TOKEN_QUEUES_MAX: Final = 64  # Names and patterns of one token: they are checked with every call.
SQS_CLOCK_SKEW_SECONDS: Final = 900  # Between the date of a signature and now, as AWS has it.
SQS_PRESIGNED_SECONDS_MAX: Final = 604_800  # How long a presigned URL may be valid, as AWS has it.
SQS_SIGNED_HEADERS_MAX: Final = 64  # Of one signature; SDKs sign about ten.
SQS_SIGNING_KEYS_MAX: Final = 4_096  # Derived keys in memory: one for each access key and day.
SQS_SIGNATURES_MAX: Final = 500_000  # Used signatures in memory, about 45 MB. Then the key with the most forgets some.
SQS_SIGNATURES_PER_KEY_MAX: Final = 250_000  # Of one access key. Then its oldest dates are refused.
SQS_SAME_SIGNATURE_SECONDS: Final = 5  # Equal calls of a second may have the same signature; later ones are replays.

# Settings of a server and options of commands: they keep mistyped numbers out.
SETTING_SECONDS_MAX: Final = 31_536_000  # A year.
SETTING_COUNT_MAX: Final = 1_000_000  # Of connections, waiting consumers, mails per second, and worlds in metrics.
SETTING_METRICS_QUEUES_MAX: Final = 10_000  # Each has several series.
SETTING_HEADER_BYTES_MIN: Final = 1_024
SETTING_HEADER_BYTES_MAX: Final = 1_048_576
SETTING_BODY_BYTES_MIN: Final = 65_536
SETTING_BODY_BYTES_MAX: Final = 268_435_456  # Bodies are in memory.
SETTING_KEEP_ALIVE_SECONDS_MAX: Final = 3_600
WORKER_CONCURRENCY_MAX: Final = 1_000  # Calls of a queue at a time.
BENCH_CALLERS_MAX: Final = 1_000  # Of `fastness bench`.
