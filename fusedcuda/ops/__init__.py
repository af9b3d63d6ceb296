"""One module per operator family: public functions, schemas, references, backward."""
