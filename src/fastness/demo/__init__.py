"""`fastness demo`: agents work against a real server, some processes are killed, and every claim is checked.

    output     the printed output: chapters, progress bars, claims with a mark each, and the table at the end
    processes  starts, kills and stops the server, agents and workers
    agents     the code of an agent process
    context    what the chapters share
    chapters/  one chapter per feature: server, mail, tickets, dead_letters, tiers, worlds, outage, pipeline
    story      runs the chapters in order, and cleans up in every case

Every process is real, every kill is SIGKILL, and every sentence with a mark was compared with the server's data. Only
the time of each kill is scripted.
"""
