"Tables of what is refused, as tests."

import pytest


def refusals(cases, ask=lambda call: call(), error=ValueError):
    """A test: of each case `ask`, or by default the case itself, is called with
    all but the last words, which its error says; the error may stand before
    them.
    """

    cases = list(cases)

    @pytest.mark.parametrize("case", cases, ids=range(len(cases)))
    def refused(case):
        *given, words = case
        own = isinstance(given[-1], type) and issubclass(given[-1], Exception)
        expected = given.pop() if own else error
        with pytest.raises(expected, match=words):
            ask(*given)

    return refused
