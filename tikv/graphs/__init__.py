"""Several operations as one: `builder` collects calls over names, `graph` records and repeats them."""
