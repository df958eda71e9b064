"""Hosts: processes that run the programs of worlds.

    app = HostApp()

    @app.program
    def counter(state, event, context): ...     # pure; called with every item of the inbox

    @app.adapter("charge_card")
    async def charge_card(call): ...            # carries out the effects that programs ask for

    with Host(plane, app): ...                  # or: fastness host shop.agents:app

A host claims worlds that have work, folds their inbox items, and commits the records of the journal, with everything
that the program has emitted, as one turn.
"""
