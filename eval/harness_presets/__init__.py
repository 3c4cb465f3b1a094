"""How public models are evaluated, as YAML files; `harness_options.load_preset` reads them."""
