"""python -m regard_command."""

from regard_command import main

raise SystemExit(main())
