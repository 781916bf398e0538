"The package's metadata comes from settings.ini, which nbdev reads too."

import re
import shutil
import sys
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
extras = {
    key.removesuffix("_requirements"): cfg[key].split()
    for key in cfg
    if key.endswith("_requirements")
}
about = Path("README.md").read_text(encoding="utf-8")
addresses = {
    "Source": cfg["git_url"],
    "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
}
if ".invalid" in str(addresses):  # the project has no address yet
    addresses = {}
else:  # an index has no chapters that a relative link could lead to
    there = f"{cfg['git_url']}/%s/{cfg['branch']}/"
    link = r"\]\((?!\w+:|#)"
    about = re.sub(rf"(!\[[^]]*){link}", rf"\1]({there % 'raw'}", about)
    about = re.sub(link, f"]({there % 'blob'}", about)


class BuildWithBook(build_py):
    """A wheel carries the chapters that belong to it, as plain notebooks, and
    their checks as modules; an editable installation finds the chapters in the
    checkout.
    """

    def run(self):
        # nothing of an earlier build
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        from tools.export import write_checks

        if self.editable_mode:
            return write_checks()
        from tools.plain import write

        package = Path(self.build_lib) / "normalnorm"
        write_checks(package=package)
        write(package / "book")


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=about,
    long_description_content_type="text/markdown",
    project_urls=addresses,
    author=cfg["author"],
    license="Apache-2.0",
    python_requires=">=" + cfg["min_python"],
    packages=find_namespace_packages(include=["normalnorm", "normalnorm.*"]),
    package_data={
        "": ["py.typed", "*.pyi", "*.npz", "*.cpp", "*.json", "*.jsonl", "*.md"]
    },
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    cmdclass={"build_py": BuildWithBook},
    zip_safe=False,
)
