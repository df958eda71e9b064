"""The console: a page for people, at `/console`.

    /console                        the page: plain ES modules, nothing to build, nothing from other hosts
    /console/<file>                 its parts, from this package
    /console/session                who is looking, and at which universes they may
    /console/events                 what has changed, and a point for each chart every second
    /console/reports                what the pipeline has written

Everything else that it shows and does goes through `/v1`, like any other program's calls.
"""
