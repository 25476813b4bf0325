"""``python -m mxtrain.cli`` runs the same command as ``mxtrain``."""

import sys

from mxtrain.cli import main

sys.exit(main())
