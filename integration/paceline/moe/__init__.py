"""Expert layers whose experts change device while training goes on."""
