"""BrowserGym (Le Sellier De Chezelles et al., 2024): tasks in a real browser, its pages as text. See README.md of this folder.

`data` loads tasks, `browsers` holds the worker processes with a browser each, `environment` plays a task in one of them, `agent`
gives an agent one tool per action, `scripted_policies` solves tasks of MiniWoB++, `world` is the world of an experiment.
"""
