"""A saga: a trip is a flight, a hotel and a car. There is no car, so the hotel and the flight are cancelled.

Each booking and the message of the next one are one commit. So are the end of a booking that failed for good and the
message of its compensation. A step may run twice if its worker crashes, so each one looks first what is booked.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python saga.py
"""

import time
import uuid

import fastness

app = fastness.TaskApp()


def set_part(trip: str, part: str, state: str) -> None:
    """Record a booking. Repeating it changes nothing."""
    document = app.plane.state(f"trips/{trip}/{part}")
    found = document.get()
    if found is None or found.value != state:
        document.update(state)
        print(f"{part}: {state}")


@app.task(queue="bookings")
def book_flight(trip: str) -> None:
    set_part(trip, "flight", "booked")


@app.task(queue="bookings")
def book_hotel(trip: str) -> None:
    set_part(trip, "hotel", "booked")


@app.task(queue="bookings", max_attempts=2, retry_delay_seconds=0.1)
def book_car(trip: str) -> None:
    raise RuntimeError(f"no car is available for trip {trip}")


@app.task(queue="bookings")
def cancel_hotel(trip: str) -> None:
    set_part(trip, "hotel", "cancelled")


@app.task(queue="bookings")
def cancel_flight(trip: str) -> None:
    set_part(trip, "flight", "cancelled")


def booking(trip: str) -> fastness.Chain:
    """The bookings of a trip. Each one names what has to be cancelled if it fails."""
    no_hotel = cancel_flight.s(trip)
    no_car = cancel_hotel.s(trip).then(no_hotel, pass_result=False)
    flight = book_flight.s(trip)
    hotel = book_hotel.s(trip).on_failure(no_hotel)
    car = book_car.s(trip).on_failure(no_car)
    return flight.then(hotel, pass_result=False).then(car, pass_result=False)


def main() -> None:
    trip = uuid.uuid4().hex[:8]
    worker = app.worker(concurrency=1, on_error=lambda error, queue: print(f"{queue}: {type(error).__name__}"))
    worker.start()
    booking(trip).send()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        flight = app.plane.state(f"trips/{trip}/flight").get()
        if flight is not None and flight.value == "cancelled":
            break
        time.sleep(0.05)
    worker.stop()


if __name__ == "__main__":
    main()
