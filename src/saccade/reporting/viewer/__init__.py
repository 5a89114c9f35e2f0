"""The local web application that shows runs, steps and episodes: `saccade view`.

run folder ──index──> SQLite beside the run ──queries──> JSON ──> pages in the browser (static/, no build step)
└── one line of a file ──episodes──> an episode with its frames, tokens and media
"""
