#!/bin/sh
# Pack the agent, compiled, as a tar archive to be unpacked on a board below any folder.
# Promise: a pure function of the agent's files. Limit: the byte code is for the guest's Python
# (trixie's 3.13); another version ignores it and reads the sources beside it.
set -eu
mkdir -p root/board
cp /recipe/__init__.py root/board/
cp -R /recipe/agent root/board/agent
python3 -m compileall -q --invalidation-mode unchecked-hash -s root root
find root -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
tar --create --file /out/agent.tar --directory root --sort=name --owner=0 --group=0 \
	--numeric-owner --mode=go=rX,u+rw --format=ustar board
