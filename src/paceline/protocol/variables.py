"""The environment variables that paceline itself reads or sets; docs/environment.md describes all those of a run."""

import re

RUN_ID = "PACELINE_RUN_ID"
SHARED_MEMORY = "PACELINE_SHARED_MEMORY"
PRELOAD = "PACELINE_PRELOAD"
AGENT_MARK = "PACELINE_AGENT_MARK"

# names of variables, and of anything else, whose values are not shown
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE", re.IGNORECASE)
