"""The training program: runs the same under the orchestrator, in one process or in many. Never imports Ray."""
