"""Run by Python as it starts, in a process that `advise exec` has begun; says nothing itself.

Python imports one module of this name only: one that the environment has of its own comes first.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ELSEWHERE = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
_SPEC = importlib.machinery.PathFinder.find_spec("sitecustomize", _ELSEWHERE)
if _SPEC is not None and _SPEC.loader is not None:
    _OWN = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_OWN)

try:
    from advisor import watched_run
except ImportError:
    # Another Python than the one that has the advisor: the job runs all the same, unwatched.
    pass
else:
    watched_run.start()
