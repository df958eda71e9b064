"""The web console at `/console`.

    /console                        the page: plain ES modules, no build step, no files from other hosts
    /console/<file>                 its scripts and styles, from this package
    /console/session                the name, verbs and universes of the token
    /console/events                 change notifications, and a metrics sample every second
    /console/reports                files that the pipeline has written
    /console/live                   the last hour of its live aggregates
    /console/pipeline               the last run of each of its jobs

Everything else goes through `/v1`, like the calls of any other client.
"""
