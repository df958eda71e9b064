"""What an acknowledgement promises.

| tier        | acknowledged when                     | survives      |
|-------------|---------------------------------------|---------------|
| CRITICAL    | synced to disk                        | power loss    |
| IMPORTANT   | in the log, synced within 5 seconds   | process crash |
| BEST_EFFORT | accepted in memory                    | neither       |

The key space knows the first two; BEST_EFFORT records go to session logs, never through a transaction.
"""

from enum import StrEnum


class Tier(StrEnum):
    """The promise a caller asks for; every acknowledgement carries the one it was given."""

    CRITICAL = "critical"
    IMPORTANT = "important"
    BEST_EFFORT = "best_effort"
