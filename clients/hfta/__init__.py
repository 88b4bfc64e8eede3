"""HFTA's two tuning tasks (appendix H.3, tables 11 and 12), as `gpumux tune` takes them: `pointnet` and `mobilenet`.

    gpumux tune clients.hfta.pointnet:factory --space clients/hfta/pointnet.toml --algorithm hyperband \\
                --steps 1000 --min-steps 4 --eta 5 --skip-last 1

The spaces are table 12's, the algorithms' settings table 11's (`tasks.py`, as is what both tasks share). The models are
those of clients/models at the size for tests, on drawn data: what is compared is what a sweep costs, not what it finds.
"""
