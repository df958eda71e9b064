"""Durable workflows: async functions whose steps are recorded in the journal of their world.

records      the journal of a run, folded into its history
scheduler    executes the code, from the history or live, in the same order
run          what the code calls: step, gather, sleep, wait_for, …
steps        runs the functions of steps, on the event loop, on threads, or on workers of a queue
runner       carries out what the code asks for, and commits its records
"""
