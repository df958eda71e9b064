"""Encrypt a universe at rest: payloads are not readable in the files, and without the key the plane does not open.

python encrypted.py
"""

import tempfile
from pathlib import Path

import fastness
from fastness.encryption_keys import new_master_key
from fastness.errors import EncryptionKeyMissing

SECRET = "account DE89 3704 0044"


def contains(folder: Path, text: str) -> bool:
    return any(text.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys, data = Path(folder, "keys"), Path(folder, "data")
        keys.touch(mode=0o600)
        keys.write_text(new_master_key("2026-11"))  # `fastness encryption new-key > keys`.
        for universe in ("plain", "shop"):
            with fastness.open(
                f"dir:{data / universe}", universe=universe, encryption=fastness.FileKeys(keys)
            ) as plane:
                if universe == "shop":
                    plane.encryption.enable("shop")
                plane.queue("payments").put({"to": SECRET})
            print(f"{universe}: readable in the files: {contains(data / universe, SECRET)}")
        try:
            fastness.open(f"dir:{data / 'shop'}")
        except EncryptionKeyMissing as error:
            print(error.code)
        with fastness.open(f"dir:{data / 'shop'}", universe="shop", encryption=fastness.FileKeys(keys)) as plane:
            message = plane.queue("payments").receive()
            assert message is not None
            print("with the key:", message.json()["to"])


if __name__ == "__main__":
    main()
