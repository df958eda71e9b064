"""How a client trusts a server, and is trusted by it."""

import ssl

from holdfast.errors import PathUnusable


def context(url: str, *, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """For the server at `url`, from files: authorities to trust, and a certificate to show, with its private key.

    None where nothing is encrypted.

    Raises:
        PathUnusable: a file is not there, or is none of its kind.
    """
    if not url.startswith("https://"):
        return None
    try:
        found = ssl.create_default_context(cafile=ca)
        if cert:
            found.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise PathUnusable(f"The certificates cannot be used ({error}); check --ca, --cert and --key") from error
    return found
