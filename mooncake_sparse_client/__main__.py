"""``python -m mooncake_sparse_client``."""

import sys

from .cli.main import main

sys.exit(main())
