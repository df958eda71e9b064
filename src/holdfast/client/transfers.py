"""What a server streams beside blobs: the files of a backup, and lists that are made while they are read.

A file that breaks off goes on where it was, because no file of a backup changes. A list is made anew each time, so
whoever asked for it has to ask again.
"""

import http.client
from typing import Final
from urllib.parse import quote, urlencode

from holdfast.client.streaming import Server, connect, headers, path, patiently, problem_in
from holdfast.errors import Unreachable
from holdfast.limits import BLOB_PART_BYTES
from holdfast.wire.backups import ListBackup, OpenBackup
from holdfast.wire.health_checks import RunCheckups

Streamed = ListBackup | OpenBackup | RunCheckups
STREAMED: Final = (ListBackup, OpenBackup, RunCheckups)


class Transfer:
    """The parts of an answer, one after the other."""

    def __init__(self, server: Server, request: Streamed) -> None:
        """Raises what is wrong with the request."""
        self._server = server
        self._request = request
        self._place = 0  # How much has come.
        self._done = False
        self._connection: http.client.HTTPConnection | None = None
        self._response = patiently(server, self._open)

    def read(self) -> bytes:
        """The next part; nothing at the end.

        Raises:
            Unreachable: the connection broke, and no other one could be had, or would not do.
        """
        if self._done:
            return b""
        part = patiently(self._server, self._part)
        self._place += len(part)
        if not part:
            self._done = True
            self.close()
        return part

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._response.close()
            self._connection.close()
            self._connection = None

    def _part(self) -> bytes:
        if self._connection is None:
            self._response = self._open()
        try:
            # What is there, and not a full part: a list is to be seen while it is made.
            return self._response.read1(BLOB_PART_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(self._request, OpenBackup):
                raise
            raise Unreachable(f"{self._server.url} broke the connection ({error}); ask again") from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> http.client.HTTPResponse:
        """The response that has the rest."""
        connection = connect(self._server)
        try:
            connection.request("GET", path(self._server, self._where()), headers=headers(self._server, Accept="*/*"))
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                raise problem_in(response.read())
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return response

    def _where(self) -> str:
        request = self._request
        if isinstance(request, RunCheckups):
            return f"/v1/checkups?deep={'true' if request.deep else 'false'}"
        if isinstance(request, ListBackup):
            return f"/v1/backups/{quote(request.id, safe='')}/files"
        said = {"start": request.start + self._place}
        if request.length is not None:
            said["length"] = max(request.length - self._place, 0)
        return f"/v1/backups/{quote(request.id, safe='')}/files/{quote(request.path)}?{urlencode(said)}"
