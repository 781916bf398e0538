"""`make mutants`: wrong versions of the library, one change each, which the
tests should notice.

Python's are made and run by mutmut (`python`), with the changes of `operators`
beside its own; C++'s by `kernel`. A seed draws some of each module. They meet
the tests that name most of what the module makes public, and the claims of its
chapter.

    python -m tools.mutants                        some of every module
    python -m tools.mutants normalnorm/theory/newton.py --count 20
    python -m tools.mutants normalnorm/theory/newton.py --tests tests/test_x.py
    python -m tools.mutants native.cpp --count 5
    python -m tools.mutants --record               what was found so far, into
                                                   results/mutation

A module's outcomes are kept in _build/mutants until the module, its tests or
`--count` change; a run that was interrupted goes on from there. A mutant that
no test can notice is named, with the argument, in
results/mutation/equivalents.json.
"""
