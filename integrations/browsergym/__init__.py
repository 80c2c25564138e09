"""BrowserGym (Le Sellier De Chezelles et al., 2024): tasks in a real browser. Its pages are text, its actions are text.

    browsers = Browsers(2)                                    # two episodes at once, a browser in a process of its own each
    environment = BrowserGym(browsers, max_steps=15)
    print(environment.reset(load_tasks("miniwob", names=["login-user"])[0]))
    print(environment.step("fill('16', 'cierra')"))

It needs Chromium: Playwright's own (`playwright install chromium`) or one on PATH (Debian: `chromium-headless-shell`).
There is no screenshot, no pause and no clock; lines of a page that repeat or say nothing are left out. No file can be sent.
"""
