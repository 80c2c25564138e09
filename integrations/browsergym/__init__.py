"""BrowserGym (Le Sellier De Chezelles et al., 2024): tasks in a real browser. Its pages are text, its actions are text.

    browsers = Browsers(2)                                    # two episodes at once, a browser in a process of its own each
    environment = BrowserGym(browsers, max_steps=15)
    print(environment.reset(load_tasks("miniwob", names=["login-user"])[0]))
    print(environment.step("fill('16', 'cierra')"))

It needs Chromium: Playwright's own (`playwright install chromium`) or one on PATH (Debian: `chromium-headless-shell`).
For speed there is no screenshot and no pause before an act; MiniWoB++'s clock is off. Lines of a page that repeat each other
or say nothing are left out. Files cannot be uploaded and `goto` takes no `file://`: a policy in training tries everything.
"""
