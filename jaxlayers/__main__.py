"""`python -m jaxlayers` is the command line."""

import sys

from jaxlayers.cli import main

sys.exit(main())
