"""Thumbnails: images are scaled down by workers, and their results are read by the sender.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python thumbnails.py
"""

import fastness
from fastness.errors import MessageFailed

app = fastness.TaskApp()
WIDTH = 640
HEIGHT = 480


@app.task(queue="thumbnails", max_attempts=3)
def shrink(image: bytes, factor: int) -> bytes:
    """A smaller copy of an image in the format PPM: the mean colour of each square of `factor` pixels."""
    kind, size, _, pixels = image.split(b"\n", 3)
    if kind != b"P6":
        raise fastness.Reject("the image is not a PPM")
    width, height = map(int, size.split())
    small = bytearray()
    for top in range(0, height - factor + 1, factor):
        for left in range(0, width - factor + 1, factor):
            for colour in range(3):
                values = [
                    pixels[((top + y) * width + left + x) * 3 + colour] for y in range(factor) for x in range(factor)
                ]
                small.append(sum(values) // len(values))
    return b"P6\n%d %d\n255\n%s" % (width // factor, height // factor, bytes(small))


def gradient(red: int) -> bytes:
    """An image that becomes brighter from left to right."""
    row = b"".join(bytes((red, x * 255 // WIDTH, 0)) for x in range(WIDTH))
    return b"P6\n%d %d\n255\n%s" % (WIDTH, HEIGHT, row * HEIGHT)


def main() -> None:
    worker = app.worker(concurrency=2)
    worker.start()
    receipts = [shrink.send(gradient(red), 8) for red in (0, 128, 255)]
    receipts.append(shrink.send(b"GIF89a\n1 1\n255\n", 8))
    for receipt in receipts:
        try:
            thumbnail = receipt.result(wait_seconds=60)
            width, height = thumbnail.split()[1:3]
            print(f"a thumbnail of {int(width)} by {int(height)} pixels, {len(thumbnail)} bytes")
        except MessageFailed as error:
            print(f"failed: {str(error).partition(': ')[2]}")
    worker.stop()


if __name__ == "__main__":
    main()
