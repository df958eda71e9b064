"""The chapters. Each is `tell(night)`: it says what happens, makes it happen, and claims what it has checked."""
