"""The chapters. Each has `run(context)`, which prints what happens, makes it happen, and checks its claims."""
