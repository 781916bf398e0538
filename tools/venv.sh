# venv.sh PYTHON FOLDER: make a virtual environment, on a bare Debian too, where the module ensurepip is a package of its own.
set -eu
python=$1 folder=$2
[ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed, $("$python" --version 2>&1) was found; say make PYTHON=/path/to/python3.12"; exit 1; }
"$python" -m venv "$folder" 2>/dev/null && exit 0
rm -rf "$folder"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing python$version-venv"
    apt-get update -qq && apt-get install -y -qq "python$version-venv" >/dev/null
    exec "$python" -m venv "$folder"
fi
echo "$python cannot make a virtual environment. On Debian or Ubuntu: sudo apt-get install python$version-venv"
exit 1
