"""Streamed answers other than blobs: the files of a backup, and lists that the server produces while they are read.

A broken file download resumes where it stopped, because a backup's files never change. A list is produced anew for each
request, so the caller has to request it again.
"""

import http.client
from typing import Final
from urllib.parse import quote, urlencode

from fastness.client.streaming import Parts, Server, headers
from fastness.errors import Unreachable
from fastness.limits import BLOB_PART_BYTES
from fastness.wire.backups import ListBackup, OpenBackup
from fastness.wire.health_checks import RunCheckups

Streamed = ListBackup | OpenBackup | RunCheckups
STREAMED: Final = (ListBackup, OpenBackup, RunCheckups)


class Transfer(Parts):
    """Reads a streamed answer."""

    def __init__(self, server: Server, request: Streamed) -> None:
        self._request = request
        super().__init__(server)

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
        return self._get(self._path(), headers(self._server, Accept="*/*"))

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
