"""What make uses: the chapter list, export, the chapter runner, the Sphinx
extension.

Not part of the installed package.
"""
