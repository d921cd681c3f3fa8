"""Programs as users of other libraries write them: docs/compatibility.md lists them."""
