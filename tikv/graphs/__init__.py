"""Several operations run as one: `builder` collects calls over names, `graph` records and repeats them."""
