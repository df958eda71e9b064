"""The synchronous twins, generated from the modules beside this folder."""
