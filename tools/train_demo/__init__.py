"""Trains the embedded demo snapshots on rendered audio; a developer tool, not part of the installed package.

    python -m tools.train_demo --help            # from the repository's root

See README.md beside this file.
"""
