"""The option that names the master keys, of commands that read encrypted universes themselves."""

from typing import Final

import click

key_file_option: Final = click.option(
    "--encryption-key-file",
    metavar="FILE",
    help="The file with the master keys of encrypted universes.  [default: FASTNESS_ENCRYPTION_KEY_FILE]",
)
