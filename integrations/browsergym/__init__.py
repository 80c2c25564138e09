"""BrowserGym (Le Sellier De Chezelles et al., 2024): tasks in a real browser, its pages as text, its actions as text.

One adapter for every benchmark of it: MiniWoB++ (its pages come with the extra `browsergym`), WebArena and WebArena-Lite (the
sites are yours to run; `data.SITES` names the variables with their addresses), and any other whose package is installed.
It needs Chromium: Playwright's own (`playwright install chromium`) or one on PATH (Debian: `chromium-headless-shell`).

    browsers = Browsers(2)                                    # two episodes at once, a browser in a process of its own each
    environment = BrowserGym(browsers, max_steps=15)
    print(environment.reset(load_tasks("miniwob", names=["login-user"])[0]))
    print(environment.step("fill('16', 'cierra')"))

Modules: `data` loads tasks without a browser, `browsers` holds the worker processes, whose code is `child`, `environment` plays
a task in one of them, `actions` is the text of actions and pages, `agent` gives an agent one tool per action,
`scripted_policies` solves 21 tasks of MiniWoB++, `world` is the world of an experiment.

What differs from stock BrowserGym, for speed: no screenshot, no pause before each of Playwright's acts, and on MiniWoB++ none
before the page is read; MiniWoB++'s clock is off. Lines of a page that repeat each other or say nothing are left out. Files
cannot be uploaded and `goto` takes no `file://`: a policy that is being trained tries everything.
"""
