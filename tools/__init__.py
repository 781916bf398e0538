"""What make uses: the chapter list, export, the chapter runner, the Sphinx
extension.

Not part of the installed package.
"""

import os

# nothing is computed by the definition because the kernel is not yet there
os.environ.setdefault("NORMALNORM_WAIT", "1")
