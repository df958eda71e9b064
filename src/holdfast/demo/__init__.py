"""`holdfast demo`: a night of a fleet of agents, told and checked.

    stage      what the audience sees: chapters, bars, claims with a mark each, and the table at the end
    cast       the processes: a server, agents and workers, each started, killed and buried here
    agents     what an agent's process does
    chapters/  one chapter a noun: mail, tickets, poison, tiers, memories, outage, history
    story      the chapters in their order, and what is cleaned up whatever happens

Nothing is staged but the moment at which somebody is killed: every process is real, every kill is SIGKILL, and every
sentence with a mark was compared with what the server says.
"""
