"""`fastness explain`: the cause and the remedy of an error code."""

from difflib import get_close_matches
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from fastness.cli import printing
from fastness.cli.commands import LeafCommand
from fastness.errors import NotFound
from fastness.remedies import REMEDIES, Remedy
from fastness.wire.problems import status_of


def _codes(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(code) for code in REMEDIES if code.startswith(incomplete)]


@click.command(
    cls=LeafCommand,
    examples=["fastness explain lease_expired", "fastness explain queue_full --json", "fastness explain"],
)
@click.argument("code", required=False, shell_complete=_codes)
def explain(code: str | None) -> None:
    """Shows its cause, what to do, and whether the same call may be repeated.

    Errors, problems of the HTTP API and log lines have the code. Without CODE, all codes are listed.
    """
    if code is None:
        printing.rows([_fields(each) for each in REMEDIES], ["code", "cause"])
        return
    known = code.strip().lower().removeprefix("urn:fastness:error:")
    if known not in REMEDIES:
        near = get_close_matches(known, REMEDIES, n=1, cutoff=0.6)
        hint = f"perhaps you mean: fastness explain {near[0]}" if near else "list all codes with: fastness explain"
        raise NotFound(f"There is no error code {code[:80]!r}; {hint}")
    printing.result(_text(known), _fields(known))


def _fields(code: str) -> dict[str, Any]:
    found = REMEDIES[code]
    of_class = (
        {"class": None, "status": found.status, "retry": None}
        if isinstance(found, Remedy)
        else {"class": found.__name__, "status": status_of(found.__new__(found)), "retry": str(found.retry)}
    )
    return {
        "code": code,
        **of_class,
        "cause": found.cause,
        "remedy": found.remedy,
        "see": f"/docs/errors/{code}",  # Of every server; an installation has no other pages.
        "pages": list(found.see),
    }


_RETRY: Final = {
    "never": "the same call fails again; change it",
    "refresh": "read the current state, then decide",
    "later": "the same call may succeed after a pause",
    "idempotent": "it may have happened; repeat it only with an idempotency key, or after a read",
}


def _text(code: str) -> str:
    fields = _fields(code)
    lines = [code + (f" ({fields['class']})" if fields["class"] else ""), ""]
    lines += [f"Cause:   {fields['cause']}", f"Remedy:  {fields['remedy']}"]
    if fields["retry"]:
        lines.append(f"Retry:   {fields['retry']}: {_RETRY[fields['retry']]}")
    if fields["status"]:
        lines.append(f"HTTP:    {fields['status']}")
    lines.append(f"See:     {fields['see']} of a running server")
    if fields["pages"]:
        lines.append(f"         {', '.join(fields['pages'])} of the documentation")
    return "\n".join(lines)
