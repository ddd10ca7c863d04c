"""What comes with the packages: configurations, examples, and the project that `gangway init` writes."""
