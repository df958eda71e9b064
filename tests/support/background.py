"""Jobs whose time a test moves: they run in its thread, and the tests see how long they pause."""

from fastness.clock import Clock
from fastness.runtime.background import BackgroundRunner, Job
from fastness.runtime.duty import Duty


class DrivenRunner(BackgroundRunner):
    """A runner without threads."""

    def __init__(self, *, duty: Duty | None = None, clock: Clock | None = None) -> None:
        self.now = 1_000.0
        super().__init__(duty=duty, clock=clock, timer=lambda: self.now, starts_threads=False)

    def start(self, job: Job) -> float:
        """Add a job, and do what is due; the pause of the job then."""
        self.add(job)
        return self.run(job)

    def advance(self, seconds: float, job: Job) -> float:
        """Move the time, and do what is due; the pause of the job then."""
        self.now += seconds
        return self.run(job)

    def run(self, job: Job) -> float:
        self.run_due()
        return job.due_at - self.now
