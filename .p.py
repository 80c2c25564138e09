def sub(p, *pairs):
    s=open(p).read()
    for a,b in pairs:
        assert s.count(a)>=1,(p,a)
        s=s.replace(a,b,1)
    open(p,'w').write(s)
sub('tests/simulate/test_walled_agent.py',
('''    assert sorted((each.task.id, each.rollout_index) for each in stored) == sorted(itertools.product((t.id for t in tasks), range(3)))
''','''    keys = itertools.product([task.id for task in tasks], range(3))
    assert sorted((each.task.id, each.rollout_index) for each in stored) == sorted(keys)
'''))
sub('dreamgym_lg/cli/agent.py',
('''    if as_json:
        parts = [part._asdict() for part in found.parts]
        print(json.dumps({"agent": agent, "ready": not found.problems, "parts": parts}, indent=2))
    else:
        _show(agent, found)
''','''    missing = capabilities().missing
    if as_json:
        parts = [part._asdict() for part in found.parts]
        isolation = {"process": not missing, "missing": missing}
        print(json.dumps({"agent": agent, "ready": not found.problems, "isolation": isolation, "parts": parts}, indent=2))
    else:
        _show(agent, found)
        console.print(_isolation(agent, missing), soft_wrap=True, highlight=False, markup=False)
'''),
('''        from dreamgym_lg.simulate.loading import load_agent

''','''        from dreamgym_lg.simulate.loading import load_agent
        from dreamgym_lg.simulate.wall.wall import capabilities

'''),
('''def _show(agent: str, found''','''def _isolation(agent: str, missing: Sequence[str]) -> str:
    """What keeps a dream of the agent from the real world on this machine."""
    from dreamgym_lg.simulate.wall.wall import GUARD_LIMITS

    if missing:
        return f"Isolation: 'process' needs {'; and '.join(missing)}. With isolation='guard', chosen by name, a guard {GUARD_LIMITS}."
    return (
        f"Isolation: DreamGym({agent!r}) plays dreams behind a wall of the kernel (isolation='process'): what is said here to leak "
        f"is stopped, its episode fails. Given the graph itself (isolation='guard'), a guard {GUARD_LIMITS}."
    )


def _show(agent: str, found'''))
