"""``mxtrain cache``: list, verify and remove the prepared texts in the cache."""

import argparse


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "cache",
        help="list, verify or remove the prepared texts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
List the prepared texts in the cache: name, size, last use, dataset, tokens, and whether a text is damaged. Set
data.prepared to a name to train on exactly that text.

  mxtrain cache
  mxtrain cache --verify         also read the tokens and compare their hashes
  mxtrain cache --prune 30       remove what was not used for 30 days, leftovers of killed processes included
  mxtrain cache --remove python-0123456789abcdef
""",
    )
    parser.set_defaults(run=_cache)
    parser.add_argument("--cache-dir", metavar="DIR", default="", help="default: $MXTRAIN_CACHE, else ~/.cache/mxtrain")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="read the tokens and compare their hashes")
    action.add_argument("--prune", metavar="DAYS", type=float, help="remove what was not used for so many days")
    action.add_argument("--remove", metavar="NAME", nargs="+", help="remove these")


def _cache(options) -> int:
    from mxtrain.cli import text_cache

    if options.prune is not None:
        print(text_cache.prune(options.cache_dir, options.prune))
    elif options.remove:
        print(text_cache.remove(options.cache_dir, options.remove))
    else:
        print(text_cache.report(options.cache_dir, options.verify))
    return 0
