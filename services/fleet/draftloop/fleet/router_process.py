"""The router's process: what `sglang_router.launch_router` does, without its imports.

That module also imports a load balancer in Python for debugging, and with it all of SGLang: 17 s and 870 MB for
nothing. This starts in half a second and takes 54 MB.
"""

from __future__ import annotations

import argparse

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main() -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()


if __name__ == "__main__":
    main()
