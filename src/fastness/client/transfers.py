"""Streamed answers other than blobs: the files of a backup, and lists that the server produces while they are read.

A broken file download resumes where it stopped, because a backup's files never change. A list is produced anew for each
request, so the caller has to request it again.
"""

import http.client
from typing import Final
from urllib.parse import quote, urlencode

from fastness.client.streaming import Server, connect, error_in, headers, path, retry
from fastness.errors import Unreachable
from fastness.limits import BLOB_PART_BYTES
from fastness.wire.backups import ListBackup, OpenBackup
from fastness.wire.health_checks import RunCheckups

Streamed = ListBackup | OpenBackup | RunCheckups
STREAMED: Final = (ListBackup, OpenBackup, RunCheckups)


class Transfer:
    """Reads a streamed answer in parts."""

    def __init__(self, server: Server, request: Streamed) -> None:
        """Raises the error with which the server rejects the request."""
        self._server = server
        self._request = request
        self._offset = 0  # How many bytes have been read.
        self._done = False
        self._connection: http.client.HTTPConnection | None = None
        self._response = retry(server, self._open)

    def read(self) -> bytes:
        """The next part; b"" at the end.

        Raises:
            Unreachable: the connection broke, and the answer cannot be resumed.
        """
        if self._done:
            return b""
        part = retry(self._server, self._read_part)
        self._offset += len(part)
        if not part:
            self._done = True
            self.close()
        return part

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._response.close()
            self._connection.close()
            self._connection = None

    def _read_part(self) -> bytes:
        if self._connection is None:
            self._response = self._open()
        try:
            # Returns available bytes without waiting for a full part: a list is shown while the server produces it.
            return self._response.read1(BLOB_PART_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(self._request, OpenBackup):
                raise
            raise Unreachable(f"{self._server.url} broke the connection ({error}); request it again") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> http.client.HTTPResponse:
        """Request the rest of the answer."""
        connection = connect(self._server)
        try:
            connection.request("GET", path(self._server, self._path()), headers=headers(self._server, Accept="*/*"))
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                raise error_in(self._server, response.status, response.read())
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return response

    def _path(self) -> str:
        request = self._request
        if isinstance(request, RunCheckups):
            return f"/v1/checkups?deep={'true' if request.deep else 'false'}"
        if isinstance(request, ListBackup):
            return f"/v1/backups/{quote(request.id, safe='')}/files"
        query = {"start": request.start + self._offset}
        if request.length is not None:
            query["length"] = max(request.length - self._offset, 0)
        return f"/v1/backups/{quote(request.id, safe='')}/files/{quote(request.path)}?{urlencode(query)}"
