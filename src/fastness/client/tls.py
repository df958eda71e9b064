"""The client's TLS context."""

import ssl

from fastness.errors import PathUnusable


def context(url: str, *, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The TLS context for `url`, from files: `ca` to trust, and a client certificate `cert` with its private `key`.

    None if `url` is not https.

    Raises:
        PathUnusable: a file cannot be read, or is not a certificate or key.
    """
    if not url.startswith("https://"):
        return None
    try:
        tls_context = ssl.create_default_context(cafile=ca)
        if cert:
            tls_context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise PathUnusable(f"Cannot load the TLS certificates ({error}); check --ca, --cert and --key") from error
    return tls_context
